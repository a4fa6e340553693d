"""A decoder's weights on the GPU: q|k|v and gate|up fused where they can be, packed or dense."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..f16acc.int2 import FEWEST_ROWS, int2_gemm_f16acc
from ..gemm.cuda import Int2Product
from ..weights.packing import PackedWeight
from .cuda_delta import DeltaHeads
from .cuda_experts import CudaMixture
from .cuda_head import HalfProjection, Int8Projection
from .cuda_structs import RowsStruct
from .shape import DecoderShape, GatedDelta, LayerShape, Mixture
from .weights import VECTORS, DecoderWeights, InputWeights, Int8Head, LayerWeights, MixtureWeights

DELTA_VECTORS = ("conv", "decay_rate", "decay_bias", "norm")


@dataclass(frozen=True, slots=True)
class Activations:
    """The input of projections: 16-bit values [m, k], or the limbs of m rows in one buffer, beside which the values may
    be kept. ``pending``: what is still to make them, by whoever takes them first."""

    data: Tensor
    limbs: bool
    kept: Tensor | None = None
    pending: RowsStruct | None = None

    @property
    def values(self) -> Tensor:
        """The 16-bit values."""
        assert not self.limbs or self.kept is not None
        return self.data if self.kept is None else self.kept


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

    def of(self, x: Activations, m: int, dtype: torch.dtype) -> Tensor:
        """The product of m rows, [m, n] of the type."""
        if not x.limbs:
            return self(x.data)
        assert self.product is not None
        return self.product.of_limbs(x.data, m, dtype)


@dataclass(frozen=True, slots=True)
class CudaLayer:
    """One layer. ``qkv`` and ``gate_up`` are one fused projection, or the separate ones in this order; ``gate_up`` is
    up alone where there is no gate. ``norms``: its vectors by the fields of :class:`~.weights.LayerWeights`.
    ``delta``: of a Gated DeltaNet mixer, what its kernels read. ``mixture``: experts; the layer's own projections are
    then the shared one's, none and None where there is none. ``input_gate``, ``input_out``: of a layer with an input of
    its own."""

    qkv: Sequence[Projection]
    o: Projection
    gate_up: Sequence[Projection]
    down: Projection | None
    norms: Mapping[str, Tensor] = field(default_factory=dict)
    delta: DeltaHeads | None = None
    mixture: CudaMixture | None = None
    input_gate: Projection | None = None
    input_out: Projection | None = None

    @property
    def projections(self) -> tuple[Projection, ...]:
        """The matrices of the layer but for experts', in the order in which a step multiplies them."""
        last = (self.down, self.input_gate, self.input_out)
        return (*self.qkv, self.o, *self.gate_up, *(each for each in last if each is not None))


@dataclass(frozen=True, slots=True)
class CudaInputs:
    """What every layer's own input is made of, on one device; see :class:`~.weights.InputWeights`.

    Attributes:
        table: [vocab, layers·size], packed or of the model's dtype. projection: to layers·size. norm: float32 [size].
    """

    table: Tensor | PackedWeight
    projection: Projection
    norm: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return self.table.nbytes + self.projection.nbytes + self.norm.nbytes

    @classmethod
    def of(cls, parts: InputWeights, device: torch.device | str, dtype: torch.dtype, act_bits: int) -> CudaInputs:
        """Tensors, or packed weights, of any device copied to this one."""
        projection = Projection(on_device(parts.projection, device, dtype), None, act_bits)
        norm = torch.as_tensor(parts.norm).to(device).float()
        return cls(on_device(parts.table, device, dtype), projection, norm)


@dataclass(frozen=True, slots=True)
class CudaModel:
    """A whole model on one device, in float16 or bfloat16.

    Attributes:
        shape: sizes. layers: from the first to the last.
        embedding: [vocab, hidden], packed or of ``dtype``.
        head: its product; unless it has 8 bits, its weight is the embedding's where they are tied. See
            :func:`head_projection`.
        final_norm, final_norm_bias: float32 [hidden].
        rotary: as of :class:`~trirun_kernels.decoder.weights.DecoderWeights`.
        dtype: of activations and 16-bit weights, float16 or bfloat16.
        act_bits: of packed projections but the head, which reads 16 bits.
        inputs: of every layer's own, or None.
    """

    shape: DecoderShape
    layers: Sequence[CudaLayer]
    embedding: Tensor | PackedWeight
    head: Projection | HalfProjection | Int8Projection
    final_norm: Tensor
    rotary: Sequence[tuple[Tensor, Tensor]]
    dtype: torch.dtype
    act_bits: int = 16
    final_norm_bias: Tensor | None = None
    inputs: CudaInputs | None = None

    @property
    def device(self) -> torch.device:
        """Where all tensors lie."""
        return self.final_norm.device

    @property
    def packed(self) -> bool:
        """Whether every projection of the layers is packed."""
        experts = all(layer.mixture is None or layer.mixture.packed for layer in self.layers)
        return experts and all(p.product is not None for layer in self.layers for p in layer.projections)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights on the device: projections, embedding, head, norms, inputs of layers."""
        tied = not isinstance(self.head, Int8Projection) and self.head.weight is self.embedding
        total = self.head.nbytes + (0 if tied else self.embedding.nbytes) + self.final_norm.nbytes
        total += 0 if self.inputs is None else self.inputs.nbytes
        for layer in self.layers:
            total += sum(p.nbytes + (0 if p.bias is None else p.bias.nbytes) for p in layer.projections)
            total += sum(norm.nbytes for norm in layer.norms.values())
            total += 0 if layer.delta is None else layer.delta.nbytes
            total += 0 if layer.mixture is None else layer.mixture.nbytes
        return total

    def with_projections(self, change: Callable[[Projection], Projection]) -> CudaModel:
        """The model with the projections of its layers and of their inputs changed; its head and experts stay."""

        def changed(layer: CudaLayer) -> CudaLayer:
            parts: dict[str, Any] = {name: tuple(map(change, getattr(layer, name))) for name in ("qkv", "gate_up")}
            for name in ("o", "down", "input_gate", "input_out"):
                if (projection := getattr(layer, name)) is not None:
                    parts[name] = change(projection)
            return replace(layer, **parts)

        inputs = self.inputs
        if inputs is not None:
            inputs = replace(inputs, projection=change(inputs.projection))
        return replace(self, layers=list(map(changed, self.layers)), inputs=inputs)

    @classmethod
    def of(
        cls, weights: DecoderWeights, device: torch.device | str, dtype: torch.dtype, *, act_bits: int = 16
    ) -> CudaModel:
        """A model of torch tensors (see :class:`~trirun_kernels.decoder.weights.DecoderWeights`) copied to the GPU."""
        layers = [
            cuda_layer(
                {name: linear.weight for name, linear in layer.linears.items()},
                {name: linear.bias for name, linear in layer.linears.items()},
                {name: getattr(layer, name) for name in VECTORS},
                device,
                dtype,
                act_bits,
                _delta_heads(layer, each, weights.shape.norm_eps, device, dtype),
                _mixture(layer.mixture, each.mixture, device, dtype, act_bits),
            )
            for layer, each in zip(weights.layers, weights.shape.layers, strict=True)
        ]
        head = weights.head.dequantize() if isinstance(weights.head, Int8Head) else weights.head
        embedding = on_device(weights.embedding, device, dtype)
        head = head_projection(embedding if weights.head is weights.embedding else on_device(head, device, dtype))
        rotary = [(torch.as_tensor(c).to(device), torch.as_tensor(s).to(device)) for c, s in weights.rotary]
        final_norm, bias = torch.as_tensor(weights.final_norm).to(device), weights.final_norm_bias
        bias = None if bias is None else torch.as_tensor(bias).to(device)
        own = None if weights.inputs is None else CudaInputs.of(weights.inputs, device, dtype, act_bits)
        return cls(weights.shape, layers, embedding, head, final_norm, rotary, dtype, act_bits, bias, own)


def rows_in_limbs(model: CudaModel, low: int, high: int) -> range:
    """Numbers of rows, within low to high, for which every projection has a fast kernel that reads limbs, but for one
    of layers' inputs that is dense."""
    if not model.packed:
        return range(0)
    before = () if model.inputs is None else (model.inputs.projection.product,)
    every = (*before, *(p.product for layer in model.layers for p in layer.projections))
    products = {product.shape_key: product for product in every if product is not None}
    for m in range(low, high + 1):
        if not all(product.reads_limbs(m) for product in products.values()):
            return range(low, m)
    return range(low, high + 1)


def cuda_layer(
    weights: Mapping[str, Any],
    biases: Mapping[str, Any],
    norms: Mapping[str, Any],
    device: torch.device | str,
    dtype: torch.dtype,
    act_bits: int,
    delta: DeltaHeads | None = None,
    mixture: CudaMixture | None = None,
) -> CudaLayer:
    """A layer from its linears by name (PackedWeight or dense tensors, on any device; "qkv" and "gate_up" where a
    checkpoint joins them), biases and norms (None or absent where there is none)."""

    def bias(*names: str) -> Tensor | None:
        found = [biases.get(name) for name in names]
        if all(b is None for b in found):
            return None
        sizes = [_rows(weights[name]) for name in names]
        parts = [torch.zeros(size) if b is None else torch.as_tensor(b) for b, size in zip(found, sizes, strict=True)]
        return torch.cat([part.to(device, dtype) for part in parts])

    def group(*names: str) -> tuple[Projection, ...]:
        names = tuple(name for name in names if name in weights)
        whole = fused([weights[name] for name in names]) if names else None
        if whole is not None:
            return (Projection(on_device(whole, device, dtype), bias(*names), act_bits),)
        return tuple(Projection(on_device(weights[name], device, dtype), bias(name), act_bits) for name in names)

    there = {name: torch.as_tensor(norm).to(device).float() for name, norm in norms.items() if norm is not None}
    (o,), (down, *own) = group("o"), [next(iter(group(name)), None) for name in ("down", "input_gate", "input_out")]
    mixed = group("qkv", "q", "k", "v", "z", "q_gate")
    return CudaLayer(mixed, o, group("gate_up", "gate", "up"), down, there, delta, mixture, *own)


def _delta_heads(
    layer: LayerWeights, shape: LayerShape, eps: float, device: torch.device | str, dtype: torch.dtype
) -> DeltaHeads | None:
    if layer.delta is None or not isinstance(shape.mixer, GatedDelta):
        return None
    vectors = {name: getattr(layer.delta, name) for name in DELTA_VECTORS}
    return delta_heads(shape.mixer, layer.delta.gates, vectors, eps, device, dtype)


def delta_heads(
    shape: GatedDelta, gates: Tensor, vectors: Mapping[str, Any], eps: float, device: torch.device | str,
    dtype: torch.dtype,
) -> DeltaHeads:  # fmt: skip
    """What the kernels of a Gated DeltaNet mixer read, from its weights (:class:`~.weights.DeltaWeights`)."""
    there = {name: torch.as_tensor(vectors[name]).to(device).float().contiguous() for name in DELTA_VECTORS}
    return DeltaHeads(shape, gates.to(device, dtype).contiguous(), eps=eps, **there)


def _mixture(
    weights: MixtureWeights | None, mixture: Mixture | None, device: torch.device | str, dtype: torch.dtype,
    act_bits: int,
) -> CudaMixture | None:  # fmt: skip
    if weights is None or mixture is None:
        return None
    every = {field.name: getattr(weights, field.name) for field in fields(weights)}
    linears = {name: every.pop(name) for name in ("gate", "up", "down")}
    return CudaMixture.of(
        mixture, {name: [linear.weight for linear in each] for name, each in linears.items()},
        {name: [linear.bias for linear in each] for name, each in linears.items()}, every, device, dtype, act_bits,
    )  # fmt: skip


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


def on_device(weight: Any, device: torch.device | str, dtype: torch.dtype) -> Any:
    """A weight on a device: packed as it is, or dense in that dtype."""
    return weight.to(device) if isinstance(weight, PackedWeight) else weight.to(device, dtype)


def head_projection(head: Tensor | PackedWeight, *, int8: bool = False) -> Projection | HalfProjection | Int8Projection:
    """The product of an output head [vocab, hidden]; ``int8``: in 8 bits unless it is packed.

    Rows of a head in 16 bits are padded with zeros to a multiple of 8, which its products need to be fast: there are as
    many logits more.
    """
    if not isinstance(head, Tensor):
        return Projection(head)
    if int8:
        return Int8Projection.of(head)
    return HalfProjection(F.pad(head, (0, 0, 0, -head.shape[0] % 8)) if head.shape[0] % 8 else head)


def _rows(weight: Any) -> int:
    return weight.n if isinstance(weight, PackedWeight) else weight.shape[0]
