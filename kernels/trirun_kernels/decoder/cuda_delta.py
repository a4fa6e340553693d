"""Gated DeltaNet layers on CUDA, between their projections: decoding, and prompts in chunks.

Thin wrappers of csrc/cuda/delta on torch tensors, as :mod:`.cuda_ops` has them for attention;
:mod:`.delta_reference` is their reference.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..gemm.cpu import DTYPES
from ..native import check_cuda
from ..native import cuda as library
from .shape import GatedDelta

_P, _I, _L = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


class DeltaStruct(ctypes.Structure):
    """``trirun_delta`` of csrc/trirun.h."""

    _fields_ = (
        *((name, _P) for name in ("x", "z", "hidden", "gate_weight", "gates", "conv", "decay_rate", "decay_bias")),
        *((name, _P) for name in ("norm", "state", "ring", "y", "activations")),
        ("activation_bytes", ctypes.c_size_t),
        *((name, _P) for name in ("mixed", "slots", "positions", "starts")),
        *((name, _L) for name in ("m", "segments", "ld_x", "ld_z", "ld_hidden", "ld_gates", "ld_y", "hidden_size")),
        *((name, _I) for name in ("key_heads", "value_heads", "key_dim", "value_dim", "taps")),
        *((name, _I) for name in ("key_stride", "k_column", "v_column", "value_stride", "z_stride", "dtype")),
        ("eps", ctypes.c_float),
    )


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """What the kernels need to know of a layer. Tensors are on the device.

    Attributes:
        shape: sizes, and the order of the projection's outputs.
        gate_weight: [b of all value heads, a of all value heads][hidden], of the activations' dtype.
        conv: float32 [taps, channels]. decay_rate, decay_bias: float32 [value_heads]. norm: float32 [value_dim].
        eps: of the norm.
    """

    shape: GatedDelta
    gate_weight: Tensor
    conv: Tensor
    decay_rate: Tensor
    decay_bias: Tensor
    norm: Tensor
    eps: float

    @property
    def makes_limbs(self) -> bool:
        """Whether a value head fills a k tile of 128 columns."""
        return self.shape.value_dim == 128

    @property
    def z_column(self) -> int:
        """Where z begins in a row that has it behind q, k and v, or between them."""
        return self.shape.columns["z_column"]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(t.nbytes for t in (self.gate_weight, self.conv, self.decay_rate, self.decay_bias, self.norm))


@dataclass(frozen=True, slots=True)
class DeltaCache:
    """What a layer keeps of its slots.

    Attributes:
        state: float32 [slots, value_heads, key_dim, value_dim].
        ring: [slots, taps, channels] of the activations' dtype: inputs of the convolution, of position p at p % taps.
    """

    state: Tensor
    ring: Tensor

    @classmethod
    def of(cls, shape: GatedDelta, slots: int, dtype: torch.dtype, device: torch.device) -> DeltaCache:
        """Of any content: a slot at position 0 reads none of it."""
        sizes = (slots, shape.value_heads, shape.key_dim, shape.value_dim)
        ring = torch.zeros(slots, shape.taps, shape.channels, dtype=dtype, device=device)
        return cls(torch.zeros(sizes, device=device), ring)


def delta_decode(
    x: Tensor, z: Tensor, hidden: Tensor, y: Tensor | None, heads: DeltaHeads, cache: DeltaCache, slots: Tensor,
    positions: Tensor, *, limbs: Tensor | None = None,
) -> None:  # fmt: skip
    """One new token per row.

    Args:
        x, z: [m, ...] with unit column stride, the projection's q, k and v, and its z. hidden: [m, hidden], its input.
        y: [m, value_heads·value_dim] of their dtype; or limbs: uint8, y's 16-bit limbs, where ``heads.makes_limbs``.
        slots, positions: int32 [m]; rows of distinct slots; a negative slot skips its row.
    """
    struct = _struct(x, z, y, heads, cache, slots, positions)
    struct.hidden, struct.ld_hidden, struct.hidden_size = hidden.data_ptr(), hidden.stride(0), hidden.shape[1]
    struct.gate_weight = heads.gate_weight.data_ptr()
    if limbs is not None:
        struct.activations, struct.activation_bytes = limbs.data_ptr(), limbs.numel()
    code = library().trirun_cuda_delta_decode(ctypes.byref(struct), torch.cuda.current_stream().cuda_stream)
    check_cuda(code, f"delta_decode: x {x.dtype} {list(x.shape)}, {heads.shape}")


def delta_prompt(
    x: Tensor, z: Tensor, gates: Tensor, y: Tensor, heads: DeltaHeads, cache: DeltaCache, slots: Tensor,
    positions: Tensor, starts: Tensor,
) -> None:  # fmt: skip
    """Rows of prompts. It allocates working memory.

    Args:
        gates: [m, 2·value_heads], ``hidden @ heads.gate_weight.T``.
        starts: int32 [segments + 1], where the segments' rows begin: consecutive tokens of one slot each.
    """
    struct = _struct(x, z, y, heads, cache, slots, positions)
    mixed = torch.empty(x.shape[0], heads.shape.channels + 2 * heads.shape.value_heads, device=x.device)
    struct.gates, struct.ld_gates = gates.data_ptr(), gates.stride(0)
    struct.mixed, struct.starts, struct.segments = mixed.data_ptr(), starts.data_ptr(), starts.shape[0] - 1
    code = library().trirun_cuda_delta_prompt(ctypes.byref(struct), torch.cuda.current_stream().cuda_stream)
    check_cuda(code, f"delta_prompt: x {x.dtype} {list(x.shape)}, {heads.shape}")


def delta_mix(
    x: Tensor, z: Tensor, hidden: Tensor, heads: DeltaHeads, cache: DeltaCache, slots: Tensor, positions: Tensor,
    decode: int, starts: Tensor | None,
) -> Tensor:  # fmt: skip
    """A batch of one new token each of ``decode`` slots and, where ``starts`` says so, rows of prompts after them:
    [m, value_heads·value_dim]. Arguments are those of :func:`delta_decode` and :func:`delta_prompt`."""
    y = torch.empty(x.shape[0], heads.shape.values, dtype=x.dtype, device=x.device)
    first, rest = slice(0, decode), slice(decode, None)
    if decode:
        delta_decode(x[first], z[first], hidden[first], y[first], heads, cache, slots[first], positions[first])
    if starts is not None:
        gates = F.linear(hidden[rest], heads.gate_weight)
        delta_prompt(x[rest], z[rest], gates, y[rest], heads, cache, slots[rest], positions[rest], starts)
    return y


def _struct(
    x: Tensor, z: Tensor, y: Tensor | None, heads: DeltaHeads, cache: DeltaCache, slots: Tensor, positions: Tensor
) -> DeltaStruct:
    struct = DeltaStruct()
    struct.x, struct.ld_x, struct.m = x.data_ptr(), x.stride(0), x.shape[0]
    struct.z, struct.ld_z = z.data_ptr(), z.stride(0)
    if y is not None:
        struct.y, struct.ld_y = y.data_ptr(), y.stride(0)
    for name in ("conv", "decay_rate", "decay_bias", "norm"):
        setattr(struct, name, getattr(heads, name).data_ptr())
    for name in ("key_heads", "value_heads", "key_dim", "value_dim", "taps"):
        setattr(struct, name, getattr(heads.shape, name))
    for name in ("key_stride", "k_column", "v_column", "value_stride", "z_stride"):
        setattr(struct, name, heads.shape.columns[name])
    struct.dtype, struct.eps = DTYPES[x.dtype], heads.eps
    struct.state, struct.ring = cache.state.data_ptr(), cache.ring.data_ptr()
    struct.slots, struct.positions = slots.data_ptr(), positions.data_ptr()
    return struct
