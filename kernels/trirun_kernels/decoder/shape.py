"""What a decoder is made of, as data: sizes, and the kind of every part of every layer.

A family of models is a description of this kind; weights, both native decoders, caches and benchmarks read it. A layer
is a mixer (which lets tokens see each other) and a feed-forward part, each with parameters of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

ACTIVATIONS = {"silu": 0, "relu2": 1, "gelu_tanh": 2, "clipped_swiglu": 3}  # TRIRUN_SILU, ...
CLIPPED_SWIGLU = "clipped_swiglu"
SCORES = {"softmax": 0, "sigmoid": 1}  # TRIRUN_ROUTE_SOFTMAX, TRIRUN_ROUTE_SIGMOID
NORMS = {"rms": 0, "layer": 1}  # TRIRUN_RMS_NORM, TRIRUN_LAYER_NORM
# In what layers with one cache are alike.
_OF_CACHES = ("kv_heads", "head_dim", "window", "rotary", "rotary_half", "interleaved")


@dataclass(frozen=True, slots=True)
class Attention:
    """A mixer: softmax attention with a cache of keys and values.

    Attributes:
        heads, kv_heads, head_dim: sizes; heads is a multiple of kv_heads.
        scale: of q · k.
        rotary: which table of :attr:`DecoderWeights.rotary` turns queries and keys; None: they are not turned.
        rotary_half: pairs that are turned, head_dim / 2 unless the rotation is partial.
        interleaved: the pairs are (2i, 2i + 1), else (i, i + rotary_half).
        window: positions that a token sees, its own among them; None: all up to its own.
        softcap: c of ``c · tanh(score / c)``; 0: none.
        row_norms: the norms of queries and keys are over all heads together, else over each head by itself.
        sinks: every head has a logit that takes part in its softmax and weighs no value.
        gated: what it gives is multiplied by the sigmoid of a projection of its input (Qwen3-Next).
        tied_values: the projection of values has the weights of that of keys (Gemma 4).
        shared_with: the layer whose keys and values it attends to, an earlier one that is alike but for its heads;
            None: it has its own.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rotary: int | None = 0
    rotary_half: int = 0
    interleaved: bool = False
    window: int | None = None
    softcap: float = 0.0
    row_norms: bool = False
    sinks: bool = False
    gated: bool = False
    tied_values: bool = False
    shared_with: int | None = None

    @property
    def q_size(self) -> int:
        """Elements of all queries of a token."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Elements of all keys, or of all values, of a token."""
        return self.kv_heads * self.head_dim

    def linear_sizes(self, hidden: int) -> dict[str, tuple[int, int]]:
        """As :meth:`LayerShape.linear_sizes`."""
        sizes = {"q": (self.q_size, hidden)}
        if self.shared_with is None:
            sizes |= dict.fromkeys(("k", "v"), (self.kv_size, hidden))
        gate = {"q_gate": (self.q_size, hidden)} if self.gated else {}
        return sizes | gate | {"o": (hidden, self.q_size)}


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """A mixer: Gated DeltaNet, a recurrence whose state per sequence has one size however long that is (Yang, Kautz,
    Hatamizadeh 2024); its reference is :mod:`.delta_reference`.

    Attributes:
        key_heads, value_heads, key_dim, value_dim: sizes; value_heads is a multiple of key_heads, neighbours among them
            share a key head. Dimensions are multiples of 16.
        taps: tokens that an output of the convolution sees.
        by_head: one projection has q, k, v and z of one key head after another (Qwen3-Next); else one has q, k and v of
            all heads, and another z.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int = 4
    by_head: bool = False

    # What attention has and this has not.
    rotary: ClassVar[None] = None
    window: ClassVar[None] = None
    sinks: ClassVar[bool] = False
    shared_with: ClassVar[None] = None

    @property
    def keys(self) -> int:
        """Elements of all keys of a token."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Elements of all values of a token."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Of the convolution: q, k and v of all heads."""
        return 2 * self.keys + self.values

    @property
    def columns(self) -> dict[str, int]:
        """Where a row of the projections, z's behind the other's, has what: the fields of ``trirun_delta_layer``."""
        keys, values = self.key_dim, self.value_heads // self.key_heads * self.value_dim
        if self.by_head:
            stride = 2 * (keys + values)
            starts = {"k_column": keys, "v_column": 2 * keys, "z_column": 2 * keys + values}
            return starts | {"key_stride": stride, "value_stride": stride, "z_stride": stride}
        starts = {"k_column": self.keys, "v_column": 2 * self.keys, "z_column": self.channels}
        return starts | {"key_stride": keys, "value_stride": values, "z_stride": values}

    @property
    def state_size(self) -> int:
        """Elements of the state of a sequence."""
        return self.value_heads * self.key_dim * self.value_dim

    def linear_sizes(self, hidden: int) -> dict[str, tuple[int, int]]:
        """As :meth:`LayerShape.linear_sizes`."""
        parts = {"qkv": self.channels, "z": self.values}
        if self.by_head:
            parts = {"qkv": self.channels + self.values}
        return {name: (n, hidden) for name, n in parts.items()} | {"o": (hidden, self.values)}


Mixer = Attention | GatedDelta
# Of the CUDA kernels, over a cache of 16 bits and of 8 bits: MAX_HEAD_DIM and MAX_INT8_HEAD_DIM of heads.cuh.
MOST_HEAD_DIM, MOST_INT8_HEAD_DIM = 512, 256


def mixer_runs(mixer: Mixer) -> bool:
    """Whether the CUDA kernels take a mixer of these sizes."""
    if isinstance(mixer, GatedDelta):
        return max(mixer.key_dim, mixer.value_dim) <= 128 and mixer.taps <= 4 and mixer.value_heads % 2 == 0
    return mixer.head_dim % 8 == 0 and mixer.head_dim <= MOST_HEAD_DIM


@dataclass(frozen=True, slots=True)
class FeedForward:
    """``down(act(gate(x)) · up(x))``, or ``down(act(up(x)))`` where it is not gated.

    Attributes:
        size: elements between. activation: of :data:`ACTIVATIONS`.
    """

    size: int
    activation: str = "silu"
    gated: bool = True


@dataclass(frozen=True, slots=True)
class Routing:
    """How a row chooses its experts and weighs them. Of equal choices the expert with the smaller index is taken.

    Attributes:
        experts, top_k: sizes; at most 512 and 32.
        score: of a logit: "softmax" over all experts, or "sigmoid".
        normalize: a row's weights are divided by their sum. Of a softmax that is the softmax of the chosen logits.
        scale: of the weights.
        groups, top_groups: experts outside of the best groups are not chosen; a group's score is the sum of its two
            best choices (DeepSeek-V3). 1 and 1: no groups.
    """

    experts: int
    top_k: int
    score: str = "softmax"
    normalize: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1

    def __post_init__(self) -> None:
        size = self.experts // max(self.groups, 1)
        fits = 1 <= self.top_k <= min(self.experts, 32) and self.experts <= 512
        grouped = 1 <= self.top_groups <= self.groups <= 32 and size * self.groups == self.experts
        grouped = grouped and (self.groups == 1 or (size >= 2 and self.top_groups * size >= self.top_k))
        if not fits or not grouped or self.score not in SCORES:
            raise ValueError(f"routing: {self} is not one that the kernels know")


@dataclass(frozen=True, slots=True)
class Mixture:
    """Experts of a feed-forward part: the weighted sum of ``down(act(gate(x)) · up(x))`` of those that a row chooses.

    Attributes:
        routing: how it chooses. size: elements between, of one expert. activation: of :data:`ACTIVATIONS`.
        limit: of "clipped_swiglu".
        shared_gate: the output of the shared expert, the layer's own feed-forward part, is multiplied by the sigmoid of
            the router's last output.
    """

    routing: Routing
    size: int
    activation: str = "silu"
    limit: float = 0.0
    shared_gate: bool = False

    @property
    def outputs(self) -> int:
        """Rows of the router."""
        return self.routing.experts + self.shared_gate

    def linear_sizes(self, hidden: int) -> dict[str, tuple[int, int]]:
        """(out_features, in_features) of every expert's linears."""
        return {"gate": (self.size, hidden), "up": (self.size, hidden), "down": (hidden, self.size)}


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer.

    Attributes:
        parallel: the feed-forward part reads what the mixer reads, else what the mixer has added to.
        vectors: norms and other vectors that it has, by the fields of :class:`~.weights.LayerWeights`.
        mixture: experts, or None. With them ``feed_forward`` is the shared one, of size 0 where there is none.
        own_input: elements of the layer's own input, see :class:`LayerInputs`; 0: it has none.
    """

    mixer: Mixer
    feed_forward: FeedForward
    parallel: bool = False
    vectors: tuple[str, ...] = ("attention_norm", "mlp_norm")
    mixture: Mixture | None = None
    own_input: int = 0

    def linear_sizes(self, hidden: int) -> dict[str, tuple[int, int]]:
        """(out_features, in_features) of the linears that the layer has, by the fields of
        :class:`~.weights.LayerWeights`, in their order."""
        sizes, ffn, own = self.mixer.linear_sizes(hidden), self.feed_forward.size, self.own_input
        if ffn:
            gate = {"gate": (ffn, hidden)} if self.feed_forward.gated else {}
            sizes |= gate | {"up": (ffn, hidden), "down": (hidden, ffn)}
        return sizes | ({"input_gate": (own, hidden), "input_out": (hidden, own)} if own else {})


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """An input of every layer's own (Gemma 4), ``scale · (norm(projection_scale · P x) + table_scale · T[token])`` of a
    row's embedding x, whose norm is of each layer's elements by themselves. A layer adds to the residual stream
    ``norm(input_out(act(input_gate(x)) · input))``, after its feed-forward part.

    Attributes:
        size: elements of one layer's, a multiple of 16. vocab: rows of the table, at least the decoder's vocabulary.
        table_scale, projection_scale, scale: factors.
    """

    size: int
    vocab: int
    table_scale: float
    projection_scale: float
    scale: float


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """A whole decoder.

    Attributes:
        hidden, vocab: sizes. The CPU decoder wants hidden to be a multiple of 16.
        layers: from the first to the last.
        norm_eps: of every norm. norm: of :data:`NORMS`, the kind of those of hidden elements; the others are RMS norms.
        embedding_scale: of the embedding's rows. residual_scale: of what a part adds to the residual stream.
        logit_softcap: c of ``c · tanh(logit / c)``; 0: none.
        inputs: of every layer's own, or None.

    Raises:
        ValueError: a layer's keys and values are those of one that has others, or its own input is of another size.
    """

    hidden: int
    vocab: int
    layers: tuple[LayerShape, ...]
    norm_eps: float
    norm: str = "rms"
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_softcap: float = 0.0
    inputs: LayerInputs | None = None

    def __post_init__(self) -> None:
        size, cached = 0 if self.inputs is None else self.inputs.size, self.cached
        for index, layer in enumerate(self.layers):
            mixer = layer.mixer
            if layer.own_input not in (0, size):
                raise ValueError(f"layer {index} has an input of {layer.own_input} elements, others of {size}")
            if not isinstance(mixer, Attention) or (source := mixer.shared_with) is None:
                continue
            other = cached.get(source) if source < index else None
            if other is None or any(getattr(mixer, each) != getattr(other, each) for each in _OF_CACHES):
                raise ValueError(f"layer {index} cannot attend to the keys and values of layer {source}")

    @classmethod
    def uniform(
        cls,
        *,
        layers: int,
        hidden: int,
        ffn: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        vocab: int,
        rotary_half: int | None = None,
        norm_eps: float = 1e-5,
        activation: str = "silu",
    ) -> DecoderShape:
        """A Llama of these sizes; ``rotary_half`` None is the whole head."""
        half = head_dim // 2 if rotary_half is None else rotary_half
        mixer = Attention(heads, kv_heads, head_dim, head_dim**-0.5, rotary_half=half)
        return cls(hidden, vocab, (LayerShape(mixer, FeedForward(ffn, activation)),) * layers, norm_eps)

    @property
    def is_llama(self) -> bool:
        """Whether it is one that :meth:`uniform` makes, with SiLU."""
        first = self.layers[0]
        mixer = first.mixer
        return isinstance(mixer, Attention) and self == self.uniform(
            layers=len(self.layers),
            hidden=self.hidden,
            ffn=first.feed_forward.size,
            heads=mixer.heads,
            kv_heads=mixer.kv_heads,
            head_dim=mixer.head_dim,
            vocab=self.vocab,
            norm_eps=self.norm_eps,
        )

    @property
    def attentions(self) -> list[Attention]:
        """The mixers that are attention."""
        return [layer.mixer for layer in self.layers if isinstance(layer.mixer, Attention)]

    @property
    def cached(self) -> dict[int, Attention]:
        """The mixers that have keys and values of their own, by their layers."""
        return {
            index: mixer
            for index, mixer in enumerate(each.mixer for each in self.layers)
            if isinstance(mixer, Attention) and mixer.shared_with is None
        }

    @property
    def deltas(self) -> list[GatedDelta]:
        """The mixers that keep a state, of which nothing can be forgotten."""
        return [layer.mixer for layer in self.layers if isinstance(layer.mixer, GatedDelta)]

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of every layer."""
        return tuple(layer.mixer.window for layer in self.layers)

    @property
    def rotary_halves(self) -> tuple[int, ...]:
        """Pairs that each table of angles turns."""
        turned = {m.rotary: m.rotary_half for m in self.attentions if m.rotary is not None}
        return tuple(turned.get(table, 0) for table in range(max(turned, default=-1) + 1))
