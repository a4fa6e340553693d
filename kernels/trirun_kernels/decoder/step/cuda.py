"""A whole decode step in one kernel (csrc/cuda/step): which models it takes, how it is divided, and its call.

Of few rows and small weights a step's time is what lies between its products, not their bytes. One kernel streams the
weights of all layers past every wait; CTAs hand their results to each other in words that say when they are there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ...gemm.cpu import DTYPES
from ...native import Int2Struct, check_cuda
from ...native import cuda as library
from ...plan.problem import Device
from ...weights.packing import PackedWeight
from ..cuda_ops import Cache, Heads
from ..cuda_weights import CudaLayer, CudaModel
from ..shape import ACTIVATIONS, Attention, LayerShape
from .division import divide

# Of a step, where they are faster than by the chain of kernels (kernels/LOG.md).
ROWS = (1, 2, 4, 8)
# Pairs of a row and a key head, of two or four rows and of eight: of more the chain is faster behind long texts.
MOST_PAIRS, MOST_PAIRS_OF_EIGHT = 128, 96
# Of eight rows of 16-bit activations, weights of a layer: of more the chain is faster beyond SHORT positions, and
# sooner where heads have more than 128 dimensions.
MOST_WEIGHTS, SHORT = 100 << 20, 4096
# Rows of one text read its keys together where one or two query heads have a key head; where four have one, eight rows
# do, and fewer from so many positions on (kernels/LOG.md). As many rows as have so many query heads of a key head.
LONG, MOST_COLUMNS = 2048, 8
# Of 8 KiB a CTA. More of them make messages wait; where there is no room for four, one row has two.
CHUNKS_IN_FLIGHT = (4, 2)
MAX_CLUSTER, UNIT, K_TILE = 8, 64, 128  # CTAs; outputs of a unit, of gate_up pairs of them; inputs of a k tile
MAX_LAYERS = 96  # of csrc/cuda/step/step.cuh
VECTORS = ("attention_norm", "mlp_norm", "attention_sub_norm", "mlp_sub_norm", "q_norm", "k_norm")

_P, _I, _L, _F = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


class StepWeightStruct(ctypes.Structure):
    """``trirun_cuda_step_weight`` of csrc/trirun.h."""

    _fields_ = tuple((name, _P) for name in ("words", "scales", "zeros"))


class StepLayerStruct(ctypes.Structure):
    """``trirun_cuda_step_layer`` of csrc/trirun.h."""

    _fields_ = (
        *((name, StepWeightStruct) for name in ("qkv", "o", "gate_up", "down")),
        ("grid_zeros", _F * 4),
        *((name, _P) for name in ("qkv_bias", "o_bias", "gate_up_bias", "down_bias")),
        *((name, _P) for name in VECTORS),
        *((name, _P) for name in ("keys", "values", "scales")),
    )


class StepStruct(ctypes.Structure):
    """``trirun_cuda_step`` of csrc/trirun.h."""

    _fields_ = (
        *((name, _P) for name in ("layers", "embedding")),
        ("packed", ctypes.POINTER(Int2Struct)),
        *((name, _P) for name in ("y", "final_norm", "tokens", "slots", "positions", "latest", "block_tables")),
        *((name, _P) for name in ("cosines", "sines", "plan", "messages")),
        ("message_bytes", ctypes.c_size_t),
        *((name, _L) for name in ("m", "layer_count", "hidden", "ffn", "heads", "kv_heads", "ld_blocks", "vocab")),
        *((name, _I) for name in ("head_dim", "rotary_half", "interleaved", "activation", "dtype", "act_bits")),
        *((name, _I) for name in ("one_text", "group_size", "real_zeros", "ctas", "cluster", "in_flight")),
        *((name, _I) for name in ("int8_cache", "attention_sub_norm")),
        *((name, _F) for name in ("eps", "scale", "embedding_scale")),
    )


def refusal(model: CudaModel, arch: int, heads: Sequence[Heads]) -> str | None:
    """Why the step kernel does not take a model, or None."""
    shape, first = model.shape, model.shape.layers[0]
    if arch != 90:
        return f"it is for compute capability 9.0, this GPU has {arch / 10}"
    if shape.inputs is not None:
        return "layers with inputs of their own"
    if any(layer != first for layer in shape.layers):
        return "layers differ"
    if len(shape.layers) > MAX_LAYERS:
        return f"more than {MAX_LAYERS} layers"
    if shape.norm != "rms" or model.final_norm_bias is not None or shape.residual_scale != 1:
        return "norms or scales that it has no form for"
    return _layer_refusal(first, shape.hidden) or _weights_refusal(model) or _heads_refusal(heads)


def _layer_refusal(layer: LayerShape, hidden: int) -> str | None:
    mixer = layer.mixer
    if not isinstance(mixer, Attention) or layer.mixture is not None or layer.parallel:
        return "layers that are not attention and one feed-forward part"
    if mixer.window or mixer.softcap or mixer.row_norms or mixer.sinks or mixer.gated:
        return "attention with a window, softcap, sinks, gate or norms over all heads"
    if not layer.feed_forward.gated or layer.feed_forward.activation not in ("silu", "relu2", "gelu_tanh"):
        return "a feed-forward part without a gate"
    if set(layer.vectors) - set(VECTORS):
        return "norms behind the parts of a layer"
    if mixer.head_dim not in (64, 128, 256) or mixer.heads // mixer.kv_heads > 16:
        return "heads that are not of 64, 128 or 256"
    sizes = (hidden, mixer.q_size, layer.feed_forward.size)
    if any(size % K_TILE for size in sizes):
        return "sizes that are no multiples of 128"
    # A cluster has two CTAs or more, and each of them a k tile of every product.
    return "a size below 256" if min(sizes) < 2 * K_TILE else None


def _weights_refusal(model: CudaModel) -> str | None:
    specs = set()
    for layer in model.layers:
        if len(layer.qkv) != 1 or len(layer.gate_up) != 1:
            return "projections that could not be joined"
        for projection in layer.projections:
            weight = projection.weight
            if not isinstance(weight, PackedWeight):
                return "weights that are not packed"
            if weight.n % 64 or weight.k % 128:
                return "sizes that are no multiples of 128"
            specs.add((weight.spec.group_size, weight.zeros is None))
    if len(specs) != 1:
        return "weights of different grids"
    ((group_size, plain),) = specs
    if group_size not in (-1, 128):
        return f"groups of {group_size}"
    if group_size == -1 and not plain:
        return "a zero point of every row"
    if group_size != -1 and model.act_bits == 8:
        return "groups with 8-bit activations"
    return "groups with heads of 256" if group_size != -1 and model.shape.attentions[0].head_dim == 256 else None


def _heads_refusal(heads: Sequence[Heads]) -> str | None:
    tables = {(None if h.cosines is None else h.cosines.data_ptr()) for h in heads}
    return "several tables of angles" if len(tables) > 1 else None


def _sizes(model: CudaModel, h: Heads, rows: int, sms: int, *, int8_cache: bool, one_text: bool = False) -> StepStruct:
    """All but the pointers, of a model that :func:`refusal` has nothing against."""
    shape, weight = model.shape, model.layers[0].projections[0].weight
    assert isinstance(weight, PackedWeight)
    # Every CTA of a cluster has inputs of every product: one that waited for none could be a phase ahead.
    depth = min(shape.hidden, h.heads * h.head_dim, shape.layers[0].feed_forward.size) // K_TILE
    cluster = min(MAX_CLUSTER, 1 << depth.bit_length() - 1)
    struct = StepStruct(
        m=rows, layer_count=len(model.layers), hidden=shape.hidden, ffn=shape.layers[0].feed_forward.size,
        heads=h.heads, kv_heads=h.kv_heads, head_dim=h.head_dim,
        rotary_half=0 if h.cosines is None else h.cosines.shape[1], interleaved=h.interleaved,
        activation=ACTIVATIONS[shape.layers[0].feed_forward.activation], dtype=DTYPES[model.dtype],
        act_bits=model.act_bits, group_size=weight.spec.group_size, real_zeros=weight.zeros is not None,
        ctas=sms // cluster * cluster, cluster=cluster, in_flight=CHUNKS_IN_FLIGHT[0], int8_cache=int8_cache,
        one_text=one_text, attention_sub_norm=_has_sub_norm(model), eps=h.eps, scale=h.scale,
        vocab=model.embedding.n if isinstance(model.embedding, PackedWeight) else model.embedding.shape[0],
        embedding_scale=shape.embedding_scale,
    )  # fmt: skip
    # Clusters lie within parts of a GPU that have different numbers of multiprocessors: not all need fit.
    struct.ctas = library().trirun_cuda_step_ctas(ctypes.byref(struct)) or struct.ctas
    for in_flight in CHUNKS_IN_FLIGHT:
        struct.in_flight = in_flight
        if _message_bytes(struct):
            break
    return struct


def _has_sub_norm(model: CudaModel) -> bool:
    return model.layers[0].norms.get("attention_sub_norm") is not None


def _message_bytes(struct: StepStruct) -> int:
    return library().trirun_cuda_step_messages(ctypes.byref(struct))


def _rows_together(model: CudaModel, h: Heads, rows: int) -> int:
    """Rows of one text that the kernel attends to together, of so many (``rows_of_item`` of csrc/cuda/step)."""
    group = h.heads // h.kv_heads
    shares = group in (1, 2, 4) and model.act_bits == 16 and not _has_sub_norm(model)
    return min(rows, MOST_COLUMNS // group) if shares else 1


def reads_keys_together(model: CudaModel, heads: Iterable[Heads], rows: int, position: int) -> bool:
    """Whether so many rows of one text, from a position on, shall be a step of ``one_text``."""
    h = next(iter(heads), None)
    if h is None or _rows_together(model, h, rows) == 1:
        return False
    return h.heads < 4 * h.kv_heads or rows > 4 or position >= LONG


def rows_taken(
    rows: Sequence[int], model: CudaModel, device: Device, heads: Sequence[Heads], context: int, int8_cache: bool,
    one_text: bool = False,
) -> tuple[tuple[int, ...], str | None]:  # fmt: skip
    """Those of the numbers of rows whose step the kernel takes, over caches of ``context`` positions, and without any
    the reason. Of deep down projections not all have room in a multiprocessor's shared memory, of the deepest none.
    one_text: the rows are of one sequence, and some of them read its keys together."""
    reason = refusal(model, device.arch, heads) if rows else "it was not asked for"
    if reason is not None:
        return (), reason
    h, hidden = heads[0], model.shape.hidden
    weights = hidden * (2 * (h.heads + h.kv_heads) * h.head_dim + 3 * model.shape.layers[0].feed_forward.size)

    def has_room(m: int) -> bool:
        struct = _sizes(model, h, m, device.sms, int8_cache=int8_cache, one_text=one_text)
        return _message_bytes(struct) > 0 and (m == 1 or struct.in_flight == CHUNKS_IN_FLIGHT[0])

    def is_faster(m: int) -> bool:
        pairs = m // (_rows_together(model, h, m) if one_text else 1) * h.kv_heads
        if m < 8:
            return m == 1 or pairs <= MOST_PAIRS
        slower = model.act_bits == 16 and weights > MOST_WEIGHTS and (context > SHORT or h.head_dim > 128)
        return pairs <= MOST_PAIRS_OF_EIGHT and not slower

    taken = tuple(m for m in rows if is_faster(m) and has_room(m))
    return taken, None if taken else "a down projection too deep for shared memory"


class CudaStep:
    """The step of so many rows of a model over its caches.

    Args:
        model: one that :func:`refusal` has nothing against. heads, caches: of every layer.
        latest: int32 [slots], the token that each of them sampled last.
        rows: of :func:`rows_taken`. sms: multiprocessors of the device.
        one_text: all rows of a call are of one slot, but for some at the end that are of none.
    """

    def __init__(
        self, model: CudaModel, heads: Sequence[Heads], caches: Sequence[Cache], latest: Tensor, rows: int, sms: int,
        one_text: bool = False,
    ) -> None:  # fmt: skip
        device, h, shape = model.device, heads[0], model.shape
        self._struct = _sizes(model, h, rows, sms, int8_cache=caches[0].scales is not None, one_text=one_text)
        clusters, ffn = self._struct.ctas // self._struct.cluster, self._struct.ffn
        k_tiles = {"qkv": shape.hidden, "gate_up": shape.hidden, "o": h.heads * h.head_dim, "down": ffn}
        starts = divide(
            (h.heads + 2 * h.kv_heads) * h.head_dim // UNIT, shape.hidden // UNIT, ffn // UNIT,
            {name: k // K_TILE for name, k in k_tiles.items()}, clusters,
        )  # fmt: skip
        structs = [_layer(layer, cache) for layer, cache in zip(model.layers, caches, strict=True)]
        table = bytearray(b"".join(bytes(struct) for struct in structs))
        self._layers = torch.frombuffer(table, dtype=torch.uint8).to(device)
        self._plan = torch.tensor(starts, dtype=torch.int32)
        self._device, self._dtype, self._hidden = device, model.dtype, shape.hidden
        self._messages = torch.zeros(_message_bytes(self._struct), dtype=torch.uint8, device=device)
        pointers = {
            "layers": self._layers, "final_norm": model.final_norm, "block_tables": caches[0].block_tables,
            "cosines": h.cosines, "sines": h.sines, "plan": self._plan, "messages": self._messages, "latest": latest,
        }  # fmt: skip
        if isinstance(model.embedding, PackedWeight):
            self._struct.packed = ctypes.pointer(Int2Struct.of(model.embedding))
        else:
            pointers["embedding"] = model.embedding
        for name, tensor in pointers.items():
            setattr(self._struct, name, None if tensor is None else tensor.data_ptr())
        self._struct.message_bytes = self._messages.numel()
        self._struct.ld_blocks = caches[0].block_tables.stride(0)

    def __call__(self, tokens: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """From tokens to the input of the head, appending to the caches.

        Args:
            tokens, slots, positions: int32 [rows]; a negative token is the one that its slot sampled last. Rows of one
                slot are neighbours at positions that follow each other. Of a negative slot nothing is appended.

        Returns:
            [rows, hidden] of the model's dtype.
        """
        y = torch.empty(tokens.shape[0], self._hidden, dtype=self._dtype, device=self._device)
        self._struct.y, self._struct.tokens = y.data_ptr(), tokens.data_ptr()
        self._struct.slots, self._struct.positions = slots.data_ptr(), positions.data_ptr()
        code = library().trirun_cuda_decoder_step(ctypes.byref(self._struct), torch.cuda.current_stream().cuda_stream)
        check_cuda(code, f"decoder step: {list(y.shape)}")
        return y

    @property
    def gave_up(self) -> bool:
        """Whether CTAs have waited for each other in vain: something else holds multiprocessors that the kernel needs.
        It waits for the device."""
        return bool(self._messages[4:8].view(torch.int32).item())


def _layer(layer: CudaLayer, cache: Cache) -> StepLayerStruct:
    projections = (layer.qkv[0], layer.o, layer.gate_up[0], layer.down)
    scales = None if cache.scales is None else cache.scales.data_ptr()
    struct = StepLayerStruct(keys=cache.keys.data_ptr(), values=cache.values.data_ptr(), scales=scales)
    for index, (name, projection) in enumerate(zip(("qkv", "o", "gate_up", "down"), projections, strict=True)):
        assert projection is not None and isinstance(projection.weight, PackedWeight)
        weight = Int2Struct.of(projection.weight)
        setattr(struct, name, StepWeightStruct(weight.words, weight.scales, weight.zeros))
        struct.grid_zeros[index] = weight.zero
        bias = projection.bias
        setattr(struct, f"{name}_bias", None if bias is None else bias.data_ptr())
    for name in VECTORS:
        vector = layer.norms.get(name)
        setattr(struct, name, None if vector is None else vector.data_ptr())
    return struct
