"""A decoder's weights on the GPU: q|k|v and gate|up fused where they can be, packed or dense."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..f16acc.int2 import FEWEST_ROWS, int2_gemm_f16acc
from ..gemm.cuda import Int2Product
from ..weights.packing import PackedWeight
from .weights import LINEARS, NORMS, DecoderShape, DecoderWeights, Int8Head


@dataclass(frozen=True, slots=True)
class Projection:
    """``y = x @ weight.T + bias`` on the current device and stream.

    Attributes:
        weight: packed, or dense [n, k] of the activations' dtype. bias: [n] of that dtype or None.
        act_bits: of a packed weight, 16 or 8.
        acc: of a packed weight, "fp32", or "fp16" for fp16 sums where float16 x has rows enough to gain from them.
        product: of a packed weight, its INT2 product.
    """

    weight: PackedWeight | Tensor
    bias: Tensor | None = None
    act_bits: int = 16
    acc: str = "fp32"
    product: Int2Product | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        w = self.weight
        product = Int2Product(w, self.bias, self.act_bits) if isinstance(w, PackedWeight) else None
        object.__setattr__(self, "product", product)

    @property
    def n(self) -> int:
        """Output features."""
        return self.weight.n if isinstance(self.weight, PackedWeight) else self.weight.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the weight with its scales."""
        return self.weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """x: [m, k], contiguous → [m, n].

        Raises:
            NativeError: the library refused the call; the message has the shapes.
        """
        w = self.weight
        if not isinstance(w, PackedWeight):
            return F.linear(x, w, self.bias)
        assert self.product is not None
        if self.acc == "fp16" and self.act_bits == 16 and x.shape[0] >= FEWEST_ROWS:
            return int2_gemm_f16acc(x, w, self.bias)
        return self.product(x)


@dataclass(frozen=True, slots=True)
class CudaLayer:
    """One layer. ``qkv`` and ``gate_up`` are one fused projection, or the separate ones in this order."""

    qkv: Sequence[Projection]
    o: Projection
    gate_up: Sequence[Projection]
    down: Projection
    norms: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def projections(self) -> tuple[Projection, ...]:
        """The matrices of the layer, in the order in which a step multiplies them."""
        return (*self.qkv, self.o, *self.gate_up, self.down)


@dataclass(frozen=True, slots=True)
class CudaModel:
    """A whole model on one device, in float16 or bfloat16.

    Attributes:
        shape: sizes. layers: from the first to the last.
        embedding, head: [vocab, hidden], one tensor where they are tied; the head's rows are padded with zeros to a
            multiple of 8, which 16-bit products need to be fast. final_norm: float32 [hidden].
        cosines, sines: float32 [positions, rotary_half].
        act_bits: of packed projections.
    """

    shape: DecoderShape
    layers: Sequence[CudaLayer]
    embedding: Tensor
    head: Tensor
    final_norm: Tensor
    cosines: Tensor
    sines: Tensor
    act_bits: int = 16

    @property
    def dtype(self) -> torch.dtype:
        """Of activations and 16-bit weights: float16 or bfloat16."""
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        """Where all tensors lie."""
        return self.embedding.device

    @property
    def packed(self) -> bool:
        """Whether every projection is packed."""
        return all(p.product is not None for layer in self.layers for p in layer.projections)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights on the device: projections, embedding, head, norms."""
        tensors = {t.data_ptr(): t.nbytes for t in (self.embedding, self.head, self.final_norm)}
        total = sum(tensors.values())
        for layer in self.layers:
            total += sum(p.nbytes + (0 if p.bias is None else p.bias.nbytes) for p in layer.projections)
            total += sum(norm.nbytes for norm in layer.norms.values())
        return total

    @classmethod
    def of(
        cls, weights: DecoderWeights, device: torch.device | str, dtype: torch.dtype, *, act_bits: int = 16
    ) -> CudaModel:
        """A model of torch tensors (see :class:`~trirun_kernels.decoder.weights.DecoderWeights`) copied to the GPU."""
        layers = [
            cuda_layer(
                {name: getattr(layer, name).weight for name in LINEARS},
                {name: getattr(layer, name).bias for name in LINEARS},
                {name: getattr(layer, name) for name in NORMS},
                device,
                dtype,
                act_bits,
            )
            for layer in weights.layers
        ]
        head = weights.head.dequantize() if isinstance(weights.head, Int8Head) else weights.head
        embedding = weights.embedding.to(device, dtype)
        head = padded_head(embedding if weights.head is weights.embedding else head.to(device, dtype))
        final_norm, cosines, sines = (
            torch.as_tensor(t).to(device) for t in (weights.final_norm, weights.cosines, weights.sines)
        )
        return cls(weights.shape, layers, embedding, head, final_norm, cosines, sines, act_bits)


def cuda_layer(
    weights: Mapping[str, Any],
    biases: Mapping[str, Any],
    norms: Mapping[str, Any],
    device: torch.device | str,
    dtype: torch.dtype,
    act_bits: int,
) -> CudaLayer:
    """A layer from its seven linears by name (PackedWeight or dense tensors, on any device), biases and norms (None or
    absent where there is none)."""

    def bias(*names: str) -> Tensor | None:
        found = [biases.get(name) for name in names]
        if all(b is None for b in found):
            return None
        sizes = [_rows(weights[name]) for name in names]
        parts = [torch.zeros(size) if b is None else torch.as_tensor(b) for b, size in zip(found, sizes, strict=True)]
        return torch.cat([part.to(device, dtype) for part in parts])

    def moved(weight: Any) -> Any:
        return weight.to(device) if isinstance(weight, PackedWeight) else weight.to(device, dtype)

    def group(*names: str) -> tuple[Projection, ...]:
        whole = fused([weights[name] for name in names])
        if whole is not None:
            return (Projection(moved(whole), bias(*names), act_bits),)
        return tuple(Projection(moved(weights[name]), bias(name), act_bits) for name in names)

    there = {name: torch.as_tensor(norm).to(device).float() for name, norm in norms.items() if norm is not None}
    (o,), (down,) = group("o"), group("down")
    return CudaLayer(group("q", "k", "v"), o, group("gate", "up"), down, there)


def fused(weights: Sequence[Any]) -> PackedWeight | Tensor | None:
    """Weights of one input as one weight, their outputs one after another; None where they cannot be joined.

    n tiles of 64 rows lie one after another, so packed weights of the same grid join by concatenation wherever no
    padding comes between them.
    """
    first = weights[0]
    if len(weights) == 1:
        return first
    if all(isinstance(w, Tensor) for w in weights):
        return torch.cat(list(weights))
    if not all(isinstance(w, PackedWeight) and w.spec == first.spec and w.k == first.k for w in weights):
        return None
    if any(w.n % 64 for w in weights[:-1]):
        return None
    zeros = None if first.zeros is None else torch.cat([w.zeros for w in weights], 1)
    words, scales = torch.cat([w.words for w in weights]), torch.cat([w.scales for w in weights], 1)
    return PackedWeight(words, scales, zeros, sum(w.n for w in weights), first.k, first.spec)


def padded_head(head: Tensor) -> Tensor:
    """An output head [vocab, hidden] with its rows padded to a multiple of 8 by zeros; itself where they are one."""
    return head if head.shape[0] % 8 == 0 else F.pad(head, (0, 0, 0, -head.shape[0] % 8))


def _rows(weight: Any) -> int:
    return weight.n if isinstance(weight, PackedWeight) else weight.shape[0]
