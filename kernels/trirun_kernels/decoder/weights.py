"""The weights of a decoder: packed linears, norms, rotary angles.

Fields typed Any hold arrays: torch tensors, numpy arrays, or :class:`~trirun_kernels.arrays.Array`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from .. import native
from ..arrays import Array
from ..weights.spec import QuantSpec
from .shape import ACTIVATIONS, NORMS, Attention, DecoderShape, GatedDelta, LayerInputs, LayerShape, Mixture

if TYPE_CHECKING:
    from torch import Tensor

    from ..weights.packing import PackedWeight

FLOATS = ("float16", "bfloat16", "float32")


@dataclass(frozen=True, slots=True)
class PackedArrays:
    """:class:`~trirun_kernels.weights.packing.PackedWeight` without torch: the same fields, arrays of any kind.

    Attributes:
        words: int32 [n_pad/64, k_pad/32, 128]. scales: float16 [k_pad/group_size, n_pad], one row for group_size -1.
        zeros: float16, shaped as scales, or None. n, k: the true shape. spec: the grid.
    """

    words: Any
    scales: Any
    zeros: Any | None
    n: int
    k: int
    spec: QuantSpec


@dataclass(frozen=True, slots=True)
class Linear:
    """``y = x @ weight.T + bias``: x [m, k] → [m, n], weight packed [n, k], bias float32 [n] or None."""

    weight: PackedWeight | PackedArrays
    bias: Any | None = None

    def check(self, name: str, shape: tuple[int, int]) -> None:
        """Raise ValueError unless this is an [n, k] linear in contiguous CPU memory."""
        w = self.weight
        if (w.n, w.k) != shape:
            raise ValueError(f"decoder: {name} must be packed {list(shape)}, got {[w.n, w.k]}")
        n, k = -(-w.n // 64) * 64, -(-w.k // 128) * 128
        w.spec.groups(w.k)
        _expect(f"{name} words", w.words, (n // 64, k // 32, 128), ("int32",))
        if (w.zeros is None) != (w.spec.zero is not None):
            raise ValueError(f"decoder: {name}: zeros belong to a grid without a zero, this one's is {w.spec.zero}")
        groups = {"scales": w.scales} | ({} if w.zeros is None else {"zeros": w.zeros})
        for part, values in groups.items():
            _expect(f"{name} {part}", values, (w.spec.groups(k), n), ("float16",))
        if w.words.data_ptr() % 16:
            raise ValueError(f"decoder: {name} is not aligned to 16 bytes")
        if self.bias is not None:
            _expect(f"{name} bias", self.bias, shape[:1])


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """What a Gated DeltaNet mixer has beside its output projection.

    Attributes:
        qkv, z: linears of the sizes of :meth:`.shape.GatedDelta.linear_sizes`; z None where qkv has it.
        gates: [b of all value heads, a of all value heads][hidden], float16, bfloat16 or float32.
        conv: float32 [taps, channels], the newest token's last; channels are q, k and v of all heads.
        decay_rate, decay_bias: float32 [value_heads], −e^A and what is added to a. norm: float32 [value_dim].
    """

    qkv: Linear
    z: Linear | None
    gates: Any
    conv: Any
    decay_rate: Any
    decay_bias: Any
    norm: Any

    def check(self, what: str, shape: GatedDelta, hidden: int) -> None:
        """Raise ValueError unless the tensors are those of the shape, in contiguous CPU memory."""
        heads = (shape.value_heads,)
        _expect(f"{what} gates", self.gates, (2 * shape.value_heads, hidden), FLOATS)
        _expect(f"{what} conv", self.conv, (shape.taps, shape.channels))
        sizes = {"decay_rate": heads, "decay_bias": heads, "norm": (shape.value_dim,)}
        for name, size in sizes.items():
            _expect(f"{what} {name}", getattr(self, name), size)


@dataclass(frozen=True, slots=True)
class MixtureWeights:
    """The experts of a layer.

    Attributes:
        gate, up, down: every expert's linears, of the sizes of :meth:`Mixture.linear_sizes` and one group size.
        router: [experts, hidden], float16, bfloat16 or float32; with a gate of the shared expert that is one row more.
        bias: float32 [experts], of the router, or None.
        correction: float32 [experts], added to scores for the choice alone, or None.
        expert_scale: float32 [experts], factors of the weights in the end (Gemma 4), or None.
    """

    gate: Sequence[Linear]
    up: Sequence[Linear]
    down: Sequence[Linear]
    router: Any
    bias: Any | None = None
    correction: Any | None = None
    expert_scale: Any | None = None

    def check(self, what: str, mixture: Mixture, hidden: int) -> None:
        """Raise ValueError unless these are the experts that ``mixture`` describes."""
        experts, group_size = mixture.routing.experts, self.gate[0].weight.spec.group_size
        for name, size in mixture.linear_sizes(hidden).items():
            linears = getattr(self, name)
            if len(linears) != experts:
                raise ValueError(f"decoder: {what} has {name} of {len(linears)} experts, the shape says {experts}")
            for index, linear in enumerate(linears):
                linear.check(f"{what} expert {index} {name}", size)
                if (own := linear.weight.spec.group_size) != group_size:
                    raise ValueError(f"decoder: {what} expert {index} {name} has groups of {own}, others {group_size}")
        _expect(f"{what} router", self.router, (mixture.outputs, hidden), FLOATS)
        for name in ("bias", "correction", "expert_scale"):
            if (vector := getattr(self, name)) is not None:
                _expect(f"{what} {name}", vector, (experts,))


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer.

    Attributes:
        q, k, v, o, gate, up, down, q_gate: linears of the sizes of :meth:`LayerShape.linear_sizes`, None where it has
            none.
        attention_norm, mlp_norm: float32 [hidden], before the part, or None.
        q_norm, k_norm: float32, before the rotation, or None: [head_dim], of every head by itself (Qwen3), or, with
            ``row_norms``, [heads·head_dim] and [kv_heads·head_dim] (OLMo 2).
        v_norm: float32 [head_dim], of every value head by itself (Gemma 4), or None.
        attention_sub_norm: float32 [heads·head_dim], before o (BitNet), or None.
        mlp_sub_norm: float32 [ffn], before down (BitNet), or None.
        attention_post_norm, mlp_post_norm: float32 [hidden], of what the part adds (Gemma 2), or None.
        shared_norm: float32 [hidden], before the shared expert where it does not read what the others do, or None.
        shared_post_norm, experts_post_norm: float32 [hidden], of its output and of the others' sum before the two are
            added (Gemma 4), or None.
        attention_norm_bias, mlp_norm_bias: float32 [hidden], of layer norms, or None.
        sinks: float32 [heads], or None (gpt-oss).
        input_gate, input_out: likewise, of the layer's own input (:class:`.shape.LayerInputs`). input_norm: float32
            [hidden], of what its part adds, or None.
        output_scale: float32 [1], what the residual stream behind the layer is multiplied by (Gemma 4), or None.
        delta: of a Gated DeltaNet mixer, or None.
        mixture: experts, or None. With them gate, up and down are the shared expert's, None where there is none.
    """

    q: Linear | None
    k: Linear | None
    v: Linear | None
    o: Linear
    gate: Linear | None
    up: Linear | None
    down: Linear | None
    attention_norm: Any | None
    mlp_norm: Any | None
    q_norm: Any | None = None
    k_norm: Any | None = None
    v_norm: Any | None = None
    attention_sub_norm: Any | None = None
    mlp_sub_norm: Any | None = None
    attention_post_norm: Any | None = None
    mlp_post_norm: Any | None = None
    shared_norm: Any | None = None
    shared_post_norm: Any | None = None
    experts_post_norm: Any | None = None
    attention_norm_bias: Any | None = None
    mlp_norm_bias: Any | None = None
    sinks: Any | None = None
    input_norm: Any | None = None
    output_scale: Any | None = None
    q_gate: Linear | None = None
    input_gate: Linear | None = None
    input_out: Linear | None = None
    delta: DeltaWeights | None = None
    mixture: MixtureWeights | None = None

    @property
    def linears(self) -> dict[str, Linear]:
        """All linears by the names of :meth:`LayerShape.linear_sizes`."""
        mixer = {} if self.delta is None else {"qkv": self.delta.qkv, "z": self.delta.z}
        found = mixer | {name: getattr(self, name) for name in LINEARS}
        return {name: linear for name, linear in found.items() if linear is not None}


@dataclass(frozen=True, slots=True)
class Int8Head:
    """An output head [vocab, hidden] in 8 bits, ``weight = scale · (byte − 128)``.

    Attributes:
        rows: uint8 [vocab, :meth:`stride`]. scales: float32 [vocab]. hidden: the true k.
    """

    rows: Any
    scales: Any
    hidden: int

    @staticmethod
    def stride(hidden: int) -> int:
        """Bytes of one row.

        Raises:
            NativeError: the CPU library is not built.
        """
        return native.cpu().trirun_cpu_head_stride(hidden)

    def dequantize(self) -> Tensor:
        """The head as a float32 tensor [vocab, hidden]; rows and scales must be tensors."""
        return (self.rows[:, : self.hidden].float() - 128) * self.scales.unsqueeze(1)

    def check(self, vocab: int, hidden: int) -> None:
        """Raise ValueError unless this is a head of that size in contiguous CPU memory."""
        _expect("8-bit head", self.rows, (vocab, self.stride(hidden)), ("uint8",))
        _expect("8-bit head's scales", self.scales, (vocab,))


@dataclass(frozen=True, slots=True)
class InputWeights:
    """What every layer's own input is made of, see :class:`.shape.LayerInputs`.

    Attributes:
        table: [vocab, layers·size], float16, bfloat16 or float32; rows are read one by one, so a mapped file serves. On
            a GPU it may be packed.
        projection: [layers·size, hidden] likewise, or packed. norm: float32 [size].
    """

    table: Any
    projection: Any
    norm: Any

    def check(self, shape: DecoderShape, own: LayerInputs) -> None:
        """Raise ValueError unless the tensors are those of the shape, in contiguous CPU memory."""
        width = len(shape.layers) * own.size
        if own.vocab < shape.vocab or own.size % 16:
            raise ValueError(f"decoder: {own} for a vocabulary of {shape.vocab}")
        _expect("table of inputs", self.table, (own.vocab, width), FLOATS)
        _expect_matrix("projection of inputs", self.projection, (width, shape.hidden))
        _expect("norm of inputs", self.norm, (own.size,))


LINEARS = ("q", "k", "v", "q_gate", "o", "gate", "up", "down", "input_gate", "input_out")
# Of a layer, besides its linears.
VECTORS = tuple(field.name for field in fields(LayerWeights) if field.name not in (*LINEARS, "delta", "mixture"))


def vector_lengths(layer: LayerShape, hidden: int) -> dict[str, int]:
    """Elements of each of :data:`VECTORS`, where a layer has it."""
    mixer, lengths = layer.mixer, dict.fromkeys(VECTORS, hidden)
    lengths |= {"mlp_sub_norm": layer.feed_forward.size, "output_scale": 1}
    if not isinstance(mixer, Attention):
        return lengths
    whole = mixer.row_norms
    lengths |= {"sinks": mixer.heads, "attention_sub_norm": mixer.q_size, "v_norm": mixer.head_dim}
    lengths |= {"q_norm": mixer.q_size if whole else mixer.head_dim}
    return lengths | {"k_norm": mixer.kv_size if whole else mixer.head_dim}


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """A whole model.

    Attributes:
        shape: its description. layers: as many as the shape has.
        embedding: [vocab, hidden], float16, bfloat16 or float32; rows are read one by one, so a mapped file serves. Or
            packed.
        head: [vocab, hidden] likewise, the embedding itself where the two are tied; or in 8 bits. A packed one reads
            16-bit activations, whatever the other linears read.
        final_norm: float32 [hidden], any factor of the logits included. final_norm_bias: likewise, or None.
        rotary: tables of the rotary angles: cosines and sines, float32 [positions, rotary_half], any attention factor
            included.
        inputs: of every layer's own, or None.
    """

    shape: DecoderShape
    layers: Sequence[LayerWeights]
    embedding: Any
    head: Any
    final_norm: Any
    rotary: Sequence[tuple[Any, Any]]
    final_norm_bias: Any | None = None
    inputs: InputWeights | None = None

    def check(self, positions: int) -> None:
        """Raise unless every tensor is what native code will take it for.

        Args:
            positions: how many the rotary angles must cover.

        Raises:
            ValueError: a shape, dtype, device or memory layout does not fit the sizes; the message has the numbers.
        """
        s = self.shape
        if s.norm not in NORMS:
            raise ValueError(f"decoder: norm {s.norm!r} is not one of {', '.join(NORMS)}")
        if len(self.layers) != len(s.layers):
            raise ValueError(f"decoder: {len(self.layers)} layers given, the shape says {len(s.layers)}")
        if len(self.rotary) < len(s.rotary_halves):
            raise ValueError(f"decoder: {len(self.rotary)} tables of angles, {len(s.rotary_halves)} are needed")
        for (cosines, sines), half in zip(self.rotary, s.rotary_halves, strict=False):
            if cosines.shape[0] < positions:
                raise ValueError(f"decoder: rotary angles of {cosines.shape[0]} positions, {positions} are needed")
            for name, table in (("cosines", cosines), ("sines", sines)):
                _expect(name, table, (cosines.shape[0], half))
        _expect("final_norm", self.final_norm, (s.hidden,))
        if self.final_norm_bias is not None:
            _expect("final_norm_bias", self.final_norm_bias, (s.hidden,))
        for name, matrix in (("embedding", self.embedding), ("head", self.head)):
            if isinstance(matrix, Int8Head):
                matrix.check(s.vocab, s.hidden)
            else:
                _expect_matrix(name, matrix, (s.vocab, s.hidden))
        if (self.inputs is None) != (s.inputs is None):
            raise ValueError(
                f"decoder: {'no ' if self.inputs is None else ''}inputs of layers, the shape says otherwise"
            )
        if self.inputs is not None and s.inputs is not None:
            self.inputs.check(s, s.inputs)
        for index, (layer, shape) in enumerate(zip(self.layers, s.layers, strict=True)):
            _check_layer(f"layer {index}", layer, shape, s.hidden)


def _check_layer(what: str, layer: LayerWeights, shape: LayerShape, hidden: int) -> None:
    activation = shape.feed_forward.activation
    if activation not in ACTIVATIONS:
        raise ValueError(f"decoder: activation {activation!r} is not one of {', '.join(ACTIVATIONS)}")
    sizes, linears = shape.linear_sizes(hidden), layer.linears
    if different := sorted(sizes.keys() ^ linears.keys()):
        there = "" if different[0] in linears else "no "
        raise ValueError(f"decoder: {what} has {there}{different[0]}, the shape says otherwise")
    for name, linear in linears.items():
        linear.check(f"{what} {name}", sizes[name])
    if layer.delta is not None and isinstance(shape.mixer, GatedDelta):
        layer.delta.check(what, shape.mixer, hidden)
    for name, length in vector_lengths(shape, hidden).items():
        if (vector := getattr(layer, name)) is not None:
            _expect(f"{what} {name}", vector, (length,))
    if (layer.mixture is None) != (shape.mixture is None):
        raise ValueError(
            f"decoder: {what} has {'no ' if layer.mixture is None else ''}experts, the shape says otherwise"
        )
    if layer.mixture is not None and shape.mixture is not None:
        layer.mixture.check(what, shape.mixture, hidden)
    needed = (*shape.vectors, *(("sinks",) if shape.mixer.sinks else ()))
    if lost := [name for name in needed if getattr(layer, name) is None]:
        raise ValueError(f"decoder: {what} has no {lost[0]}, the shape says otherwise")


def is_packed(matrix: Any) -> bool:
    """Whether an embedding or a head is packed: it has words, with torch or without."""
    return hasattr(matrix, "words")


def _expect_matrix(name: str, matrix: Any, shape: tuple[int, int]) -> None:
    if is_packed(matrix):
        Linear(matrix).check(name, shape)
    else:
        _expect(name, matrix, shape, FLOATS)


def _expect(name: str, x: Any, shape: tuple[int, ...], dtypes: tuple[str, ...] = ("float32",)) -> None:
    try:
        array = Array.of(x)
    except ValueError as error:
        raise ValueError(f"decoder: {name}: {error}") from None
    if array.shape != shape or array.dtype not in dtypes:
        raise ValueError(
            f"decoder: {name} must be {' or '.join(dtypes)} {list(shape)}, got {array.dtype} {list(array.shape)}"
        )
