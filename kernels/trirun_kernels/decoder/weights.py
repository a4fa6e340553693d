"""What a Llama-like decoder is made of: sizes, packed linears, norms, rotary angles.

Fields typed Any hold arrays: torch tensors, numpy arrays, or :class:`~trirun_kernels.arrays.Array`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from .. import native
from ..arrays import Array
from ..weights.spec import QuantSpec

if TYPE_CHECKING:
    from torch import Tensor

    from ..weights.packing import PackedWeight

ACTIVATIONS = {"silu": 0, "relu2": 1}  # TRIRUN_SILU, TRIRUN_RELU2
FLOATS = ("float16", "bfloat16", "float32")


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Sizes and constants of a Llama-like decoder.

    Attributes:
        layers, hidden, ffn, heads, kv_heads, head_dim, vocab: sizes; heads is a multiple of kv_heads. The CPU decoder
            wants hidden to be a multiple of 16.
        rotary_half: pairs that rotate, head_dim / 2 unless the rotation is partial.
        norm_eps: of every RMS norm. attention_scale: of q · k.
        activation: "silu" or "relu2", of ``act(gate) * up``.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    rotary_half: int
    norm_eps: float
    attention_scale: float
    activation: str = "silu"

    @property
    def linear_sizes(self) -> dict[str, tuple[int, int]]:
        """(out_features, in_features) of a layer's linears by their names, in the order of :data:`LINEARS`."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        hidden, ffn = self.hidden, self.ffn
        sizes = ((q, hidden), (kv, hidden), (kv, hidden), (hidden, q), (ffn, hidden), (ffn, hidden), (hidden, ffn))
        return dict(zip(LINEARS, sizes, strict=True))


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
class LayerWeights:
    """One decoder layer.

    Attributes:
        q, k, v, o, gate, up, down: linears of the sizes of :attr:`DecoderShape.linear_sizes`.
        attention_norm, mlp_norm: float32 [hidden].
        q_norm, k_norm: float32 [head_dim], of every head by itself before the rotation (Qwen3), or None.
        attention_sub_norm: float32 [heads·head_dim], before o (BitNet), or None.
        mlp_sub_norm: float32 [ffn], before down (BitNet), or None.
    """

    q: Linear
    k: Linear
    v: Linear
    o: Linear
    gate: Linear
    up: Linear
    down: Linear
    attention_norm: Any
    mlp_norm: Any
    q_norm: Any | None = None
    k_norm: Any | None = None
    attention_sub_norm: Any | None = None
    mlp_sub_norm: Any | None = None


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


LINEARS = ("q", "k", "v", "o", "gate", "up", "down")
NORMS = tuple(field.name for field in fields(LayerWeights) if field.name not in LINEARS)
SIZES = ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab")


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """A whole model.

    Attributes:
        shape: its sizes. layers: of its ``shape.layers`` layers.
        embedding: [vocab, hidden], float16, bfloat16 or float32; rows are read one by one, so a mapped file serves.
        head: [vocab, hidden] likewise, the embedding itself where the two are tied; or in 8 bits.
        final_norm: float32 [hidden].
        cosines, sines: float32 [positions, rotary_half] of the rotary angles, any attention factor included.
    """

    shape: DecoderShape
    layers: Sequence[LayerWeights]
    embedding: Any
    head: Any
    final_norm: Any
    cosines: Any
    sines: Any

    def check(self, positions: int) -> None:
        """Raise unless every tensor is what native code will take it for.

        Args:
            positions: how many the rotary angles must cover.

        Raises:
            ValueError: a shape, dtype, device or memory layout does not fit the sizes; the message has the numbers.
        """
        s = self.shape
        if s.activation not in ACTIVATIONS:
            raise ValueError(f"decoder: activation {s.activation!r} is not one of {', '.join(ACTIVATIONS)}")
        if len(self.layers) != s.layers:
            raise ValueError(f"decoder: {len(self.layers)} layers given, the shape says {s.layers}")
        if self.cosines.shape[0] < positions:
            raise ValueError(f"decoder: rotary angles of {self.cosines.shape[0]} positions, {positions} are needed")
        for name in ("cosines", "sines"):
            _expect(name, getattr(self, name), (self.cosines.shape[0], s.rotary_half))
        _expect("final_norm", self.final_norm, (s.hidden,))
        _expect("embedding", self.embedding, (s.vocab, s.hidden), FLOATS)
        if isinstance(self.head, Int8Head):
            self.head.check(s.vocab, s.hidden)
        else:
            _expect("head", self.head, (s.vocab, s.hidden), FLOATS)
        shapes = s.linear_sizes
        lengths = {name: s.hidden for name in ("attention_norm", "mlp_norm")} | {"q_norm": s.head_dim}
        lengths |= {"k_norm": s.head_dim, "attention_sub_norm": s.heads * s.head_dim, "mlp_sub_norm": s.ffn}
        for index, layer in enumerate(self.layers):
            for name, shape in shapes.items():
                getattr(layer, name).check(f"layer {index} {name}", shape)
            for name, length in lengths.items():
                if (norm := getattr(layer, name)) is not None:
                    _expect(f"layer {index} {name}", norm, (length,))


def _expect(name: str, x: Any, shape: tuple[int, ...], dtypes: tuple[str, ...] = ("float32",)) -> None:
    try:
        array = Array.of(x)
    except ValueError as error:
        raise ValueError(f"decoder: {name}: {error}") from None
    if array.shape != shape or array.dtype not in dtypes:
        raise ValueError(
            f"decoder: {name} must be {' or '.join(dtypes)} {list(shape)}, got {array.dtype} {list(array.shape)}"
        )
