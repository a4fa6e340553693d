"""llama.cpp's model of each family that trirun writes: what its code does of itself, and the file need not say.

From llama.cpp's ``src/models`` in llama-cpp-python 0.3.36. What a target does not have, a model must not need.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Target:
    """llama.cpp's model of a family.

    Attributes:
        architecture: its name there.
        neighbours: pairs of elements that are turned are (2i, 2i + 1) of a head; else (i, i + half).
        activation: of the feed-forward part.
        windows: layers "may" have sliding windows, or some "must"; None: every layer sees everything.
        turned: layers that rotate: "all", those with a "window", or all but every "fourth".
        head: the output head is "any", always the embedding ("tied"), or always a tensor of its own ("own").
        softcap: where it has one: of "attention", of "logits". Both are in the file.
        logit_scale: of the file: logits are "multiplied" by it, "divided" by it; or None.
        scales: the file has factors of attention, embedding and residual stream.
        root_embedding: the embedding is multiplied by the root of the hidden size.
        wide_layers: with that many layers, attention's factor is that of heads of hidden size / heads elements.
        attention_scale: of scores; None: one by the root of a head's size.
        own_sizes: layers with a window have heads of another size, and every layer keys, values and a feed-forward part
            of its own size, or an earlier one's keys and values; see :func:`shared_layer`.
        rotary: types of rotary settings that it has in layers that see everything.
        experts: the weights of the chosen ones are "normalized" to a sum of 1, "plain", or as the file says ("said").
        dense: it may have no experts. limit: of an activation that has one.
        biases: linears of attention must have some.
        rounded_ramp: models whose yarn ramp has bounds that are not rounded are written all the same: llama.cpp's own
            converter writes them so, and the published ones are all of this kind. Export says it.
        norms: its names of norms by fields, where they are not those of :data:`.architecture.NORMS`.
    """

    architecture: str
    neighbours: bool = False
    activation: str = "silu"
    windows: str | None = None
    turned: str = "all"
    head: str = "any"
    softcap: tuple[str, ...] = ()
    logit_scale: str | None = None
    scales: bool = False
    root_embedding: bool = False
    wide_layers: int | None = None
    attention_scale: float | None = None
    own_sizes: bool = False
    rotary: tuple[str, ...] = ("default", "linear", "yarn")
    experts: str = "normalized"
    dense: bool = True
    limit: float = 0.0
    biases: bool = False
    rounded_ramp: bool = False
    norms: Mapping[str, str] | None = None


_LLAMA3 = ("default", "linear", "yarn", "llama3")
_LLAMA = Target("llama", neighbours=True, rotary=_LLAMA3)
_GEMMA = Target("gemma", activation="gelu_tanh", head="tied", root_embedding=True)
_GRANITE = replace(_LLAMA, architecture="granite", logit_scale="divided", scales=True)
_COHERE = Target("command-r", neighbours=True, head="tied", logit_scale="multiplied", rotary=("default",))
_GLM = Target("chatglm", neighbours=True)
_OLMO2 = Target("olmo2", windows="may", head="own")
_EXAONE4 = Target("exaone4", rotary=_LLAMA3)
_LATE_NORM = {"mlp_norm": "post_attention_norm"}

# By model_type.
TARGETS = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "ministral": _LLAMA,
    "ministral3": replace(_LLAMA, architecture="mistral3"),
    "mixtral": _LLAMA,
    "qwen2": Target("qwen2"),
    "qwen3": Target("qwen3"),
    "qwen2_moe": Target("qwen2moe", experts="plain", head="own"),
    "qwen3_moe": Target("qwen3moe"),
    "qwen3_next": Target("qwen3next", norms=_LATE_NORM, dense=False),
    "qwen3_5_text": Target("qwen35", norms=_LATE_NORM),
    "qwen3_5_moe_text": Target("qwen35moe", norms=_LATE_NORM, dense=False),
    "olmoe": Target("olmoe", experts="plain", head="own"),
    "bitnet": Target("bitnet", head="tied"),
    "gemma": _GEMMA,
    "gemma2": replace(_GEMMA, architecture="gemma2", windows="must", softcap=("attention", "logits"), wide_layers=46),
    "gemma3_text": replace(
        _GEMMA, architecture="gemma3", windows="may", softcap=("logits",), wide_layers=62, head="any"
    ),
    "gemma4_text": replace(
        _GEMMA,
        architecture="gemma4",
        windows="must",
        softcap=("logits",),
        head="any",
        attention_scale=1.0,
        own_sizes=True,
        rotary=("proportional",),
    ),
    "phi3": Target("phi3", rotary=("default", "linear", "yarn", "longrope")),
    "granite": _GRANITE,
    "granitemoe": replace(_GRANITE, architecture="granitemoe"),
    "glm": _GLM,
    "glm4": replace(_GLM, architecture="glm4"),
    "gpt_oss": Target(
        "gpt-oss",
        activation="clipped_swiglu",
        windows="must",
        head="own",
        rotary=("default", "yarn"),
        dense=False,
        limit=7.0,
        biases=True,
        rounded_ramp=True,
        norms=_LATE_NORM,
    ),
    "glm4_moe": Target("glm4moe", experts="said", norms=_LATE_NORM),
    "olmo": Target("olmo", neighbours=True),
    "olmo2": _OLMO2,
    "olmo3": _OLMO2,
    "smollm3": Target("smollm3", neighbours=True, turned="fourth"),
    "cohere": _COHERE,
    "cohere2": replace(_COHERE, architecture="cohere2", windows="must", turned="window"),
    "starcoder2": Target("starcoder2", activation="gelu_tanh"),
    "ernie4_5": Target("ernie4_5", neighbours=True),
    "seed_oss": Target("seed_oss", norms=_LATE_NORM),
    "exaone4": _EXAONE4,
    "arcee": replace(_LLAMA, architecture="arcee", activation="relu2"),
    "nemotron": Target("nemotron", activation="relu2", head="own"),
    "stablelm": Target("stablelm", head="own"),
}


def shared_layer(own: int, *, window: bool) -> int:
    """The layer whose keys and values one attends to that is behind the ``own`` layers that have such of their own."""
    return own - (2 if window else 1)


def target_of(family: str, layers: int) -> Target | None:
    """llama.cpp's model of a family with that many layers; None where it has none, or trirun does not write it."""
    if family == "exaone4" and layers == 64:
        return replace(_EXAONE4, windows="must", turned="window")
    return TARGETS.get(family)
