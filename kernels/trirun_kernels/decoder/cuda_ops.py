"""What lies between a decoder's matrix products on CUDA: rows, attention over a paged cache, sampling.

Thin wrappers of csrc/cuda/decoder on torch tensors. They launch on the current stream, allocate nothing, and can
be captured in CUDA graphs; :mod:`trirun_kernels.decoder.cuda_reference` has their references.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..gemm.cpu import DTYPES
from ..native import Int2Struct, check_cuda
from ..native import cuda as library
from ..weights.packing import PackedWeight
from .cuda_structs import AttentionStruct, CombineStruct, GatherStruct, RowsStruct, SampleStruct
from .shape import ACTIVATIONS

_ACTIVATIONS = ACTIVATIONS | {"sigmoid": 8}  # TRIRUN_SIGMOID, of attention's output gate

RESIDUAL, EMBED, GATE, PLAIN, POST = range(5)  # TRIRUN_ROWS_*
PAGE = 64  # positions of one page
PROMPT_TOKEN = -(2**31)  # of the counts of penalties: the token is in the prompt
SAMPLER_BYTES = 56


@dataclass(frozen=True, slots=True)
class Heads:
    """What attention needs to know of a model and a layer.

    Attributes:
        heads, kv_heads, head_dim: sizes. scale: of q · k. eps: of the head norms.
        cosines, sines: float32 [positions, rotary_half] on the device, or None where nothing rotates.
        q_norm, k_norm, v_norm: float32 [head_dim] or None. sinks: float32 [heads] or None.
        interleaved, window, softcap: as of :class:`~.shape.Attention`.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    eps: float
    cosines: Tensor | None
    sines: Tensor | None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    v_norm: Tensor | None = None
    sinks: Tensor | None = None
    interleaved: bool = False
    window: int | None = None
    softcap: float = 0.0


@dataclass(frozen=True, slots=True)
class Cache:
    """Keys and values of one layer, and int32 [slots, blocks] page numbers.

    Attributes:
        keys, values: [pages, kv_heads, 64, head_dim] of the model's dtype; or int8, head_dim rounded up to 16.
        scales: of int8, float16 [pages, kv_heads, 64, 2]: of a token's key, which is mixed, and of its value.
    """

    keys: Tensor
    values: Tensor
    block_tables: Tensor
    scales: Tensor | None = None


@dataclass(frozen=True, slots=True)
class SamplingState:
    """What sampling keeps on the device.

    Attributes:
        samplers: uint8 [slots, 56], a ``trirun_sampler`` each. latest: int32 [slots], the last sampled token.
        counts: int32 [slots, vocab], how often a token was generated, negative where it is in the prompt; or None.
        bias_tokens, bias_values: int32 and float32 [slots, capacity].
        work: float32 [rows, vocab].
        masks: int32 [slots, ceil(vocab/32)], a bit per token that may be chosen, of slots that have a mask; or None.
    """

    samplers: Tensor
    latest: Tensor
    counts: Tensor | None
    bias_tokens: Tensor
    bias_values: Tensor
    work: Tensor
    masks: Tensor | None = None


def rows(source: int, x: Tensor | PackedWeight | None, **options: Any) -> None:
    """Makes rows as :func:`rows_struct` describes them.

    Raises:
        NativeError: the library is missing, or refused the call; the message has the shapes.
    """
    struct = rows_struct(source, x, **options)
    code = library().trirun_cuda_rows(ctypes.byref(struct), _stream())
    check_cuda(code, f"rows: source {source}, type {struct.dtype}, {[struct.m, struct.n]}")


def rows_struct(
    source: int,
    x: Tensor | PackedWeight | None,
    *,
    up: Tensor | None = None,
    residual: Tensor | None = None,
    norm: Tensor | None = None,
    norm_bias: Tensor | None = None,
    post_norm: Tensor | None = None,
    centered: bool = False,
    scale: float = 1.0,
    output_scale: float = 1.0,
    eps: float = 0.0,
    y: Tensor | None = None,
    limbs: Tensor | None = None,
    act_bits: int = 16,
    activation: str = "silu",
    tokens: Tensor | None = None,
    slots: Tensor | None = None,
    latest: Tensor | None = None,
    mixed: CombineStruct | None = None,
) -> RowsStruct:
    """One pass over rows: a source, an optional norm, and 16-bit values or limbs as result.

    Args:
        source: RESIDUAL (``residual += scale · x``), EMBED (``residual = scale · x[token]``), GATE (``act(x) · up``, or
            ``act(x)``), PLAIN (``x``) or POST (``residual += scale · rms_norm(x)``, of the weight post_norm).
        x: [m, n] of float16 or bfloat16, unit column stride; for EMBED the embedding [vocab, n], packed or not. up: as
            x, same stride.
        residual: float32 [m, n], written by RESIDUAL, EMBED and POST. norm, norm_bias, post_norm: float32 [n].
        centered: the norm is a layer norm, else an RMS norm.
        output_scale: of the residual stream behind the sum of RESIDUAL or POST.
        y: [m, n] of x's dtype, x itself serves; with limbs, and a packed embedding or no x, there need be none.
        limbs: uint8, as :func:`trirun_kernels.gemm.activations.quantize_activations` makes them.
        tokens: int32 [m]; a negative one stands for ``latest[slots[row]]``, int32 both.
        mixed: with RESIDUAL, the weighted sum to add instead of x; x is what it sums, for its size and type.
    """
    packed = x if isinstance(x, PackedWeight) else None
    x = None if isinstance(x, PackedWeight) else x
    like, typed = x if residual is None else residual, y if x is None else x
    if like is None or (typed is None and packed is None and limbs is None):
        raise ValueError(f"rows: source {source} needs x, or a residual and y or limbs")
    (m, n), dtype, vocab = like.shape, torch.float16 if typed is None else typed.dtype, 0
    if tokens is not None:
        m = tokens.shape[0]
        vocab = packed.n if packed is not None else 0 if x is None else x.shape[0]
    return RowsStruct(
        _pointer(x), _pointer(up), _pointer(residual), _pointer(norm), _pointer(norm_bias), _pointer(post_norm),
        _pointer(y), _pointer(limbs),
        0 if limbs is None else limbs.numel(), _pointer(tokens), _pointer(slots), _pointer(latest),
        m, n, n if x is None else x.stride(0), n if y is None else y.stride(0), vocab,
        eps, scale, source, DTYPES[dtype], _ACTIVATIONS[activation], act_bits, centered, output_scale,
        None if packed is None else ctypes.pointer(Int2Struct.of(packed)),
        None if mixed is None else ctypes.pointer(mixed),
    )  # fmt: skip


def attention_workspace(m: int, heads: Heads, splits: int, device: torch.device) -> Tensor:
    """Zeroed working memory for :func:`attention_decode` of at most m rows with these splits."""
    chunks = -(-(heads.heads // heads.kv_heads) // 8)
    counters = -(-m * heads.kv_heads * chunks * 8 * 4 // 256) * 256  # of every key head's eight query heads
    size = counters + m * heads.heads * splits * (heads.head_dim + 2) * 4
    return torch.zeros(size, dtype=torch.uint8, device=device)


def attention_makes_limbs(heads: Heads) -> bool:
    """Whether the query heads of a key head (of eight query heads, if more) fill k tiles of 128 columns."""
    group = heads.heads // heads.kv_heads
    return group * heads.head_dim % 128 == 0 and (group <= 8 or 8 * heads.head_dim % 128 == 0)


def attention_decode(
    q: Tensor, k: Tensor | None, v: Tensor | None, y: Tensor | None, heads: Heads, cache: Cache, slots: Tensor,
    positions: Tensor, splits: int, workspace: Tensor, *, limbs: Tensor | None = None,
) -> None:  # fmt: skip
    """One new token per row: norm and rotate q and k, norm v, append k and v to the cache, attend, write y or limbs.

    Args:
        q: [m, heads·head_dim]; k, v: [m, kv_heads·head_dim] with one stride, or None where another layer has stored
            those of these rows too, so that nothing is appended; y: as q. float16 or bfloat16.
        limbs: uint8, takes y's 16-bit limbs instead; only where :func:`attention_makes_limbs`.
        slots, positions: int32 [m]; rows of distinct slots; a negative slot skips its row.
        splits: CTAs that share the keys of a row.
        workspace: of :func:`attention_workspace` for exactly these rows and splits.
    """
    struct = _attention(q, k, v, y, heads, cache, slots, positions, splits, limbs)
    code = library().trirun_cuda_attention_decode(
        ctypes.byref(struct), workspace.data_ptr(), workspace.numel(), _stream()
    )
    check_cuda(code, f"attention_decode: q {q.dtype} {list(q.shape)}, {heads.heads} over {heads.kv_heads} heads")


def attention_append(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    y: Tensor,
    heads: Heads,
    cache: Cache,
    slots: Tensor,
    positions: Tensor,
    *,
    rotate_keys: bool = False,
) -> None:
    """The first half of :func:`attention_decode` for any rows of any slots: y is the rotated q, and may be q; mixed as
    the keys are for an int8 cache (:func:`.cuda_reference.mixed`).

    Args:
        rotate_keys: k itself becomes what a cache of its type has of it.
    """
    struct = _attention(q, k, v, y, heads, cache, slots, positions, 1)
    keys = _pointer(k if rotate_keys else None)
    code = library().trirun_cuda_attention_append(ctypes.byref(struct), keys, _stream())
    check_cuda(code, f"attention_append: q {q.dtype} {list(q.shape)}, {heads.heads} over {heads.kv_heads} heads")


def gather(
    cache: Cache, slots: Tensor, starts: Tensor, pages: Tensor, total: int, longest: int, head_dim: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Positions of some slots, one slot after another: keys (of an int8 cache mixed) and values, which are
    [total, kv_heads, head_dim]. It allocates them.

    Args:
        slots: int32 [n]. starts: int32 [n + 1], where each slot's positions begin, and ``total`` at the end.
        pages: int32 [n], the page of each slot that its positions begin with.
        longest: most positions of one slot.
    """
    kv_heads = cache.keys.shape[1]
    keys = torch.empty(total, kv_heads, head_dim, dtype=dtype, device=cache.keys.device)
    values = torch.empty_like(keys)
    struct = GatherStruct(
        cache.keys.data_ptr(), cache.values.data_ptr(), _pointer(cache.scales), cache.block_tables.data_ptr(),
        slots.data_ptr(), starts.data_ptr(), pages.data_ptr(), keys.data_ptr(), values.data_ptr(), slots.shape[0],
        longest, kv_heads, cache.block_tables.stride(0), head_dim, DTYPES[dtype],
    )  # fmt: skip
    check_cuda(library().trirun_cuda_attention_gather(ctypes.byref(struct), _stream()), f"gather: {list(keys.shape)}")
    return keys, values


def sample(
    logits: Tensor,
    slots: Tensor,
    state: SamplingState,
    sampled: Tensor,
    *,
    logprobs: Tensor | None = None,
    wanted: Tensor | None = None,
    positions: Tensor | None = None,
    tokens: Tensor | None = None,
) -> None:
    """The next token of every row.

    Args:
        logits: [m, vocab], any of the three dtypes. slots: int32 [m], distinct; a negative one skips its row.
        sampled: int32 [m], the result, -1 where no allowed logit is a finite number.
        logprobs: float32 [m], of the unmodified logits, for slots that want them.
        wanted: int32 [m], 0 leaves a row out. positions, tokens: int32 [m], advanced to the next step's.
    """
    struct = SampleStruct(
        logits.data_ptr(), slots.data_ptr(), _pointer(wanted), state.samplers.data_ptr(), _pointer(state.counts),
        state.bias_tokens.data_ptr(), state.bias_values.data_ptr(), _pointer(state.masks), state.work.data_ptr(),
        sampled.data_ptr(),
        _pointer(logprobs), state.latest.data_ptr(), _pointer(positions), _pointer(tokens), logits.shape[0],
        logits.shape[1], logits.stride(0), state.bias_tokens.shape[1], DTYPES[logits.dtype], 0,
    )  # fmt: skip
    check_cuda(library().trirun_cuda_sample(ctypes.byref(struct), _stream()), f"sample: logits {list(logits.shape)}")


def _attention(
    q: Tensor, k: Tensor | None, v: Tensor | None, y: Tensor | None, heads: Heads, cache: Cache, slots: Tensor,
    positions: Tensor, splits: int, limbs: Tensor | None = None,
) -> AttentionStruct:  # fmt: skip
    return AttentionStruct(
        q.data_ptr(), _pointer(k), _pointer(v), _pointer(y), _pointer(limbs),
        0 if limbs is None else limbs.numel(), cache.keys.data_ptr(), cache.values.data_ptr(),
        _pointer(cache.scales), cache.block_tables.data_ptr(), slots.data_ptr(), positions.data_ptr(),
        _pointer(heads.q_norm), _pointer(heads.k_norm), _pointer(heads.v_norm), _pointer(heads.cosines),
        _pointer(heads.sines), _pointer(heads.sinks),
        q.shape[0], heads.heads, heads.kv_heads, q.stride(0), 0 if k is None else k.stride(0),
        q.shape[1] if y is None else y.stride(0), cache.block_tables.stride(0), heads.head_dim,
        0 if heads.cosines is None else heads.cosines.shape[1], splits,
        DTYPES[q.dtype], heads.interleaved, heads.window or 0, heads.eps, heads.scale, heads.softcap, 0,
    )  # fmt: skip


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _stream() -> int:
    return torch.cuda.current_stream().cuda_stream
