"""Which models of GGUF are read: config.json as transformers has it, names and shapes of tensors, orders of rows.

In the architecture ``llama`` (and ``mistral``), q and k have their rows in the order of another rotary embedding, which
turns neighbours instead of halves: of each head's rows, ``2i + j`` is transformers' ``j head_dim/2 + i``. The other
architectures here keep transformers' order. Whole rows change places, so that packed rows do as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from trirun_kernels.weights.names import (
    BIAS,
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    LAYER_LINEARS,
    LAYER_NORMS,
    WEIGHT,
    layer_prefix,
)

from ....errors import InputError
from .file import GgufFile
from .mixtures import MIXTRAL, OLMOE, QWEN3_MOE, ROUTER, Mixture, expert_tensors, mixture_config
from .rotary import rotary_config

# llama.cpp's names of a layer's tensors, by their fields. Some are of models that are only written.
LINEARS = {
    "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output", "gate": "ffn_gate", "up": "ffn_up",
    "down": "ffn_down", "input_gate": "inp_gate", "input_out": "proj",
}  # fmt: skip
NORMS = {
    "attention_norm": "attn_norm", "mlp_norm": "ffn_norm", "q_norm": "attn_q_norm", "k_norm": "attn_k_norm",
    "attention_sub_norm": "attn_sub_norm", "mlp_sub_norm": "ffn_sub_norm",
    "attention_post_norm": "post_attention_norm", "mlp_post_norm": "post_ffw_norm",
    "shared_norm": "ffn_norm", "shared_post_norm": "post_ffw_norm_1", "experts_post_norm": "post_ffw_norm_2",
    "input_norm": "post_norm", "output_scale": "layer_output_scale", "sinks": "attn_sinks",
}  # fmt: skip
_ROPE_FREQS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class Family:
    """How an architecture's models differ.

    Attributes:
        model_type, class_name: in config.json. norms: of a layer, by their fields. biases: linears that have one:
            "qkv", "some" for what the file says, or "none". permuted: see the module. activation: of the MLP.
        activation_bits: what its models are trained to run with. mixture: of experts, in the place of one MLP.
        whole_norms: q and k are normalized as a whole, not head by head.
    """

    model_type: str
    class_name: str
    norms: tuple[str, ...] = ("attention_norm", "mlp_norm")
    biases: str = "none"
    permuted: bool = False
    activation: str = "silu"
    activation_bits: int = 16
    mixture: Mixture | None = None
    whole_norms: bool = False


_QK_NORMS = ("attention_norm", "mlp_norm", "q_norm", "k_norm")
MIXTRAL_FAMILY = Family("mixtral", "MixtralForCausalLM", permuted=True, mixture=MIXTRAL)
_BITNET = Family(
    "bitnet",
    "BitNetForCausalLM",
    ("attention_norm", "mlp_norm", "attention_sub_norm", "mlp_sub_norm"),
    activation="relu2",
    activation_bits=8,
)
FAMILIES = {
    "llama": Family("llama", "LlamaForCausalLM", biases="some", permuted=True),
    "mistral": Family("mistral", "MistralForCausalLM", permuted=True),
    "qwen2": Family("qwen2", "Qwen2ForCausalLM", biases="qkv"),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM", _QK_NORMS),
    "qwen3moe": Family("qwen3_moe", "Qwen3MoeForCausalLM", _QK_NORMS, mixture=QWEN3_MOE),
    "olmoe": Family("olmoe", "OlmoeForCausalLM", _QK_NORMS, mixture=OLMOE, whole_norms=True),
    "bitnet-b1.58": _BITNET,
    "bitnet-25": _BITNET,
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """A file's model.

    Attributes:
        family: of its architecture. config: config.json. names: transformers' names of tensors to the file's.
        heads: tensors whose rows are permuted, to the number of heads. experts: tensors that are one expert's matrix of
            the file's tensor, to the expert's number.
    """

    family: Family
    config: dict[str, Any]
    names: dict[str, str]
    heads: dict[str, int]
    experts: dict[str, int]

    def in_order(self, name: str, rows: Any) -> Any:
        """The rows (or the numbers of a bias) of a tensor, by transformers' name, in transformers' order."""
        if name not in self.heads:
            return rows
        order = np.arange(len(rows)).reshape(self.heads[name], -1, 2).swapaxes(1, 2).reshape(-1)
        return rows[order]


def read_architecture(file: GgufFile) -> Architecture:
    """The model of a file, its tensors held against its metadata.

    Raises:
        InputError: its architecture is not one that is read, or it is rotated; metadata are missing or senseless; a
            tensor is missing, unknown, or not of the shape they say.
    """
    family = _family(file)
    config = _config(file, family)
    names: dict[str, str] = {}
    heads: dict[str, int] = {}
    experts: dict[str, int] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, stored, shape, permuted_heads in _expected(file, family, config):
        names[name], shapes[stored] = stored, shape
        if permuted_heads:
            heads[name] = permuted_heads
    mixture = family.mixture
    every = () if mixture is None else range(config["num_hidden_layers"])
    stacked = [found for layer in every if mixture is not None for found in expert_tensors(config, mixture, layer)]
    shapes |= {stored: shape for stored, shape, _ in stacked}
    for stored, shape in shapes.items():
        if stored not in file.tensors:
            raise InputError(f"{file.path}: there is no tensor {stored}")
        if file.tensors[stored].shape != shape:
            found = list(file.tensors[stored].shape)
            raise InputError(f"{file.path}: {stored} has shape {found}; the metadata say {list(shape)}")
    # After the shapes were checked: how many experts there are is no longer the metadata's word alone.
    for stored, shape, pattern in stacked:
        own = {pattern.format(expert): expert for expert in range(shape[0])}
        names |= dict.fromkeys(own, stored)
        experts |= own
    unknown = next((stored for stored in file.tensors if stored not in shapes and stored != _ROPE_FREQS), None)
    if unknown is not None:
        raise InputError(f"{file.path}: {unknown} is no tensor of a {family.model_type} model that trirun reads")
    return Architecture(family, config, names, heads, experts)


def _family(file: GgufFile) -> Family:
    metadata, name = file.metadata, file.metadata.architecture
    rotated = next((key for key in metadata if key.startswith("prism.hadamard.")), None)
    if rotated is not None:
        raise InputError(
            f"{file.path}: its weights are rotated by a Hadamard transform ({rotated}), which trirun does not apply; "
            "without it the model writes nonsense",
            "take a release of the model that is not rotated",
        )
    if name not in FAMILIES:
        raise InputError(f"{file.path}: its architecture is {name!r}; {', '.join(FAMILIES)} are read from GGUF")
    experts = metadata.count(".expert_count", 0, least=0)
    if experts and name == "llama":
        return MIXTRAL_FAMILY
    if bool(experts) != (FAMILIES[name].mixture is not None):
        kind = "a mixture of experts" if experts else "no mixture of experts"
        raise InputError(f"{file.path} is {kind}, which no {name} model is that trirun reads")
    return FAMILIES[name]


def _config(file: GgufFile, family: Family) -> dict[str, Any]:
    """config.json, but for the token ids."""
    metadata, embedding = file.metadata, file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise InputError(f"{file.path}: there is no tensor token_embd.weight [vocabulary, hidden size]")
    hidden, heads = metadata.count(".embedding_length"), metadata.count(".attention.head_count")
    head_dim = metadata.count(".attention.key_length", hidden // heads or None)
    for key in (".attention.value_length", ".rope.dimension_count"):
        if metadata.count(key, head_dim) != head_dim:
            raise InputError(f"{file.path}: {key} is {metadata.count(key)}, the heads' size {head_dim}")
    kv_heads = metadata.count(".attention.head_count_kv", heads)
    if heads % kv_heads or head_dim % 2:
        raise InputError(f"{file.path}: {heads} heads of {head_dim} over {kv_heads} key-value heads")
    layers = metadata.count(".block_count")
    if layers > len(file.tensors):
        raise InputError(f"{file.path}: block_count is {layers}, in a file of {len(file.tensors)} tensors")
    config: dict[str, Any] = {
        "architectures": [family.class_name],
        "model_type": family.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": metadata.count(".feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": family.activation,
        "max_position_embeddings": metadata.count(".context_length"),
        "rms_norm_eps": metadata.number(".attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": "bfloat16" if embedding.type.name == "BF16" else "float16",
    }
    if family.model_type != "llama":
        # Files do not say it. Released models of these families attend to everything.
        config["sliding_window"] = None
    if family.biases == "some":
        config["attention_bias"] = "blk.0.attn_output.bias" in file.tensors
        config["mlp_bias"] = "blk.0.ffn_down.bias" in file.tensors
    if family.mixture is not None:
        config |= mixture_config(metadata, family.mixture)
    factors = np.frombuffer(file.raw(_ROPE_FREQS), "<f4") if _is_fp32(file, _ROPE_FREQS) else None
    config |= rotary_config(file.metadata, config, factors)
    return config


def _is_fp32(file: GgufFile, name: str) -> bool:
    if name in file.tensors and file.tensors[name].type.name != "F32":
        raise InputError(f"{file.path}: {name} is {file.tensors[name].type.name}, not F32")
    return name in file.tensors


def _expected(
    file: GgufFile, family: Family, config: Mapping[str, Any]
) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
    """Every tensor of such a model: transformers' name, the file's, its shape, and its heads where its rows are
    permuted, else 0."""
    hidden, ffn, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    q, kv = heads * head_dim, kv_heads * head_dim
    linears = {
        "q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q),
        "gate": (ffn, hidden), "up": (ffn, hidden), "down": (hidden, ffn),
    }  # fmt: skip
    if family.mixture is not None:
        linears = {field: shape for field, shape in linears.items() if field not in ("gate", "up", "down")}
    q_norm, k_norm = (q, kv) if family.whole_norms else (head_dim, head_dim)
    norms = {"q_norm": q_norm, "k_norm": k_norm, "attention_sub_norm": q, "mlp_sub_norm": ffn}
    permuted = {"q": heads, "k": kv_heads} if family.permuted else {}
    biased = {"qkv": ["q", "k", "v"], "none": []}.get(family.biases)
    if biased is None:
        biased = ["q", "k", "v", "o"] * config["attention_bias"] + ["gate", "up", "down"] * config["mlp_bias"]
    yield EMBEDDING, "token_embd.weight", (config["vocab_size"], hidden), 0
    yield FINAL_NORM, "output_norm.weight", (hidden,), 0
    if not config["tie_word_embeddings"]:
        yield HEAD, "output.weight", (config["vocab_size"], hidden), 0
    for layer in range(config["num_hidden_layers"]):
        ours, theirs = layer_prefix(layer), f"blk.{layer}."
        for field in family.norms:
            yield ours + LAYER_NORMS[field], f"{theirs}{NORMS[field]}.weight", (norms.get(field, hidden),), 0
        if family.mixture is not None:
            router = (config[family.mixture.count], hidden)
            yield f"{ours}{family.mixture.router}{WEIGHT}", f"{theirs}{ROUTER}{WEIGHT}", router, 0
        for field, shape in linears.items():
            name, stored, order = ours + LAYER_LINEARS[field], theirs + LINEARS[field], permuted.get(field, 0)
            yield name + WEIGHT, stored + WEIGHT, shape, order
            if field in biased:
                yield name + BIAS, stored + BIAS, shape[:1], order
