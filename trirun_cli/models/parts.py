"""What a family's entry is made of: a description of the decoder and the names of its tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from trirun_kernels.weights.names import LAYER_LINEARS, LAYER_NORMS

from ..errors import InputError
from .rotary import ROTARY_TYPES, rotary_parameters, turned_pairs
from .settings import MOST_HEAD_DIM

if TYPE_CHECKING:
    from trirun_kernels.decoder.shape import DecoderShape, LayerShape, Mixer, Mixture

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "relu2": "relu2",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
# Tensors that only some models of a family have.
OPTIONAL = ("attention_norm_bias", "mlp_norm_bias")
NO_NORMS = ("sinks", "output_scale")  # the vectors of a layer that are no norms and no biases


class UnsupportedModel(ValueError):
    """Why the native decoder does not run a model, in its message; transformers' own modelling can run it."""


@dataclass(frozen=True, slots=True)
class MixtureNames:
    """What the tensors of a layer's mixture of experts are called, within the layer.

    Attributes:
        experts: the module that holds expert ``i`` as ``i.gate``, ``i.up`` and ``i.down``.
        router: the tensor [experts, hidden]. bias: of its logits; correction: of the choice; or None.
        shared: modules of the shared expert, by the fields of :class:`~trirun_kernels.decoder.weights.LayerWeights`.
        shared_gate: the module of its gate, one output, or None.
        linear_router: the router's tensor is the weight of a linear layer, which may be packed.
        router_scale: the tensor [hidden] of a router that reads the row without mlp_norm's weights, times this and
            1 / √hidden (Gemma 4); or None.
        expert_scale: the tensor [experts] of factors of the weights, or None.
    """

    experts: str = "mlp.experts"
    router: str = "mlp.gate.weight"
    bias: str | None = None
    correction: str | None = None
    shared: Mapping[str, str] = field(default_factory=dict)
    shared_gate: str | None = None
    linear_router: bool = False
    router_scale: str | None = None
    expert_scale: str | None = None

    def modules(self, mixture: Mixture) -> list[str]:
        """Every module of every expert."""
        experts = range(mixture.routing.experts)
        return [f"{self.experts}.{index}.{part}" for index in experts for part in ("gate", "up", "down")]


@dataclass(frozen=True, slots=True)
class TensorNames:
    """What the tensors of a layer are called, within the layer.

    Attributes:
        linears: modules by the fields of :class:`~trirun_kernels.decoder.weights.LayerWeights`.
        vectors: tensors likewise; None is a norm without weights.
        fused: modules that hold several linears, their outputs one after another.
        norm_offset: what is added to the weights of all norms: 1 where the file has their distance from 1.
        delta: of layers whose mixer is Gated DeltaNet; ``gates``: of those, the modules that have b and a, or both,
            and the rows of each.
        mixture: of layers with experts.
        inputs: outside of layers, the modules "table" and "projection" and the tensor "norm" of
            :class:`~trirun_kernels.decoder.weights.InputWeights`.
    """

    linears: Mapping[str, str]
    vectors: Mapping[str, str | None]
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    norm_offset: float = 0.0
    delta: TensorNames | None = None
    gates: Mapping[str, int] = field(default_factory=dict)
    mixture: MixtureNames = field(default_factory=MixtureNames)
    inputs: Mapping[str, str] = field(default_factory=dict)

    def of(self, layer: LayerShape) -> TensorNames:
        """The names of a layer of that kind. With experts, its feed-forward part is the shared one."""
        own = self if self.delta is None or hasattr(layer.mixer, "heads") else self.delta
        if getattr(layer.mixer, "tied_values", False):
            own = replace(own, linears={**own.linears, "v": own.linears["k"]})
        if layer.mixer.shared_with is not None:
            linears, vectors = _without(own.linears, ("k", "v")), _without(own.vectors, ("k_norm", "v_norm"))
            own = replace(own, linears=linears, vectors=vectors)
        if layer.mixture is None:
            return own
        mixer = _without(own.linears, ("gate", "up", "down"))
        shared = own.mixture.shared if layer.feed_forward.size else {}
        return replace(own, linears=mixer | dict(shared))

    def modules(self, mixture: Mixture | None = None) -> list[str]:
        """Every module of a layer that holds linears; ``mixture``: its experts."""
        joined = {name for names in self.fused.values() for name in names}
        experts = [] if mixture is None else self.mixture.modules(mixture)
        apart = dict.fromkeys(module for name, module in self.linears.items() if name not in joined)
        return [*apart, *self.fused, *experts]


def _without(names: Mapping[str, Any], left_out: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in names.items() if name not in left_out}


_PRE = {name: LAYER_NORMS[name] for name in ("attention_norm", "mlp_norm")}
_HEADS = {name: LAYER_NORMS[name] for name in ("q_norm", "k_norm")}
LLAMA = TensorNames(LAYER_LINEARS, _PRE)
QK_NORM = replace(LLAMA, vectors=_PRE | _HEADS)
BITNET = replace(LLAMA, vectors=_PRE | {name: LAYER_NORMS[name] for name in ("attention_sub_norm", "mlp_sub_norm")})
SANDWICH = replace(
    LLAMA,
    vectors={
        "attention_norm": "input_layernorm.weight",
        "attention_post_norm": "post_attention_layernorm.weight",
        "mlp_norm": "pre_feedforward_layernorm.weight",
        "mlp_post_norm": "post_feedforward_layernorm.weight",
    },
    norm_offset=1.0,
)
QK_SANDWICH = replace(SANDWICH, vectors={**SANDWICH.vectors, **_HEADS})
POST = replace(
    LLAMA,
    vectors=_HEADS
    | {
        "attention_post_norm": "post_attention_layernorm.weight",
        "mlp_post_norm": "post_feedforward_layernorm.weight",
    },
)
ONE_NORM = replace(LLAMA, vectors=dict.fromkeys(_PRE, "input_layernorm.weight"))
NO_WEIGHTS = replace(LLAMA, vectors=dict.fromkeys(_PRE))
UNGATED = replace(LLAMA, linears=_without(LAYER_LINEARS, ("gate",)))
GATE_UP = {"mlp.gate_up_proj": ("gate", "up")}
QKV = {"self_attn.qkv_proj": ("q", "k", "v")}


def with_norm_biases(names: TensorNames) -> TensorNames:
    """The names of a family whose layer norms may have biases."""
    biases = {"attention_norm_bias": _PRE["attention_norm"], "mlp_norm_bias": _PRE["mlp_norm"]}
    vectors = {name: tensor.removesuffix("weight") + "bias" for name, tensor in biases.items()}
    return replace(names, vectors={**names.vectors, **vectors})


@dataclass(frozen=True, slots=True)
class Description:
    """A decoder as its config.json describes it.

    Attributes:
        shape: what it is made of. names: of its tensors.
        rotary: the settings of each of its tables of angles. logit_scale: of the logits.
        longest: positions that it can have.
    """

    shape: DecoderShape
    names: TensorNames
    rotary: tuple[dict[str, Any], ...]
    logit_scale: float
    longest: int


def describe(
    config: Mapping[str, Any],
    names: TensorNames = LLAMA,
    *,
    windows: Sequence[int | None] | None = None,
    mixers: Sequence[Mixer | None] = (),
    rotated: Sequence[bool] | None = None,
    rotary_kinds: Sequence[str] = (),
    partial: bool = False,
    norm: str = "rms",
    eps: str = "rms_norm_eps",
    parallel: bool = False,
    gated: bool = True,
    activation: str = "hidden_act",
    logit_scale: float = 1.0,
    longest: int | None = None,
    attention: Mapping[str, Any] | None = None,
    own_attention: Sequence[Mapping[str, Any]] = (),
    widths: Sequence[int] = (),
    **whole: Any,
) -> Description:
    """A decoder with Llama's settings in config.json, but for what is said here.

    Args:
        mixers: of every layer, the mixer of one that has no attention.
        windows, rotated: of every layer, its window, and whether it rotates; None: none has one, all do.
        rotary_kinds: of every layer, the name of its rotary settings, where there are several.
        partial: whether a part of a head may be rotated.
        eps, activation: names of these settings.
        longest: positions that it can have, where fewer than the config's.
        attention: fields of :class:`~trirun_kernels.decoder.shape.Attention` that every layer has; own_attention: of
            every layer, those that are its own. whole: of :class:`~trirun_kernels.decoder.shape.DecoderShape`.
        widths: of every layer, elements of its feed-forward part, where they differ.

    Raises:
        UnsupportedModel: something that the native decoder does not have. InputError: a size is missing or is none.
    """
    from trirun_kernels.decoder.shape import Attention, DecoderShape, FeedForward, LayerShape

    act = config.get(activation) or "silu"
    if not isinstance(act, str) or act not in ACTIVATIONS:
        raise UnsupportedModel(f"activation {act!r} is not one of {', '.join(ACTIVATIONS)}")
    layers, heads, hidden = config["num_hidden_layers"], config["num_attention_heads"], config["hidden_size"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    tables: list[str | None] = [*dict.fromkeys(rotary_kinds)] or [None]
    rotary = tuple(_rotary(config, kind, partial) for kind in tables)

    def layer(index: int) -> LayerShape:
        table = tables.index(rotary_kinds[index]) if rotary_kinds else 0
        window = windows[index] if windows else None
        mixer = Attention(heads, kv_heads, head_dim, head_dim**-0.5, rotary=table, window=window)
        mixer = replace(mixer, **(attention or {}), **(own_attention[index] if own_attention else {}))
        if heads % mixer.kv_heads or hidden % 16:
            raise UnsupportedModel(f"{heads} heads over {mixer.kv_heads} key-value heads, hidden size {hidden}")
        if mixer.head_dim > MOST_HEAD_DIM:
            raise InputError(f"config.json: heads of {mixer.head_dim}, above {MOST_HEAD_DIM}")
        if rotated and not rotated[index]:
            mixer = replace(mixer, rotary=None)
        else:
            mixer = replace(mixer, rotary_half=turned_pairs(rotary[table], mixer.head_dim))
        feed_forward = FeedForward(widths[index] if widths else config["intermediate_size"], ACTIVATIONS[act], gated)
        made = LayerShape(mixers[index] or mixer if mixers else mixer, feed_forward, parallel)
        if (inputs := whole.get("inputs")) is not None:
            made = replace(made, own_input=inputs.size)
        return replace(made, vectors=tuple(name for name in names.of(made).vectors if name not in OPTIONAL))

    shape = DecoderShape(
        hidden,
        config["vocab_size"],
        tuple(layer(index) for index in range(layers)),
        config.get(eps) or 1e-6,
        norm,
        **whole,
    )
    halves = {(mixer.rotary, mixer.rotary_half) for mixer in shape.attentions if mixer.rotary is not None}
    if len(halves) > len({table for table, _ in halves}):
        raise UnsupportedModel("heads of several sizes that have the same rotary settings")
    most = config.get("max_position_embeddings") or 2048
    for each in rotary:
        trained = each.get("original_max_position_embeddings")
        if each["rope_type"] == "longrope" and trained:
            # With more tokens every key is to be turned by other angles than those in the cache.
            most = min(most, trained)
    return Description(shape, names, rotary, logit_scale, min(most, longest or most))


def _rotary(config: Mapping[str, Any], kind: str | None, partial: bool) -> dict[str, Any]:
    found = rotary_parameters(config, kind)
    if found["rope_type"] not in ROTARY_TYPES:
        raise UnsupportedModel(f"rotary type {found['rope_type']!r} is not one of {', '.join(ROTARY_TYPES)}")
    if found["partial_rotary_factor"] > 1:
        raise InputError(f"config.json: partial_rotary_factor is {found['partial_rotary_factor']!r}, above 1")
    if found["partial_rotary_factor"] != 1 and not partial:
        # Of these families transformers turns the whole head for some rotary types and a part of it for others.
        raise UnsupportedModel(f"partial_rotary_factor {found['partial_rotary_factor']!r}")
    return found
