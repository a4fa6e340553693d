"""A tokenizer.json from the metadata of a GGUF file, with the chat template and the special tokens.

Two kinds of tokenizers are read. ``gpt2`` is byte-level BPE: tokens and merges, and ``tokenizer.ggml.pre``, the name of
the pattern that text is split by before. llama.cpp takes GPT-2's for a name that it does not know, which gives other
tokens than the model was trained with; here that is an error. ``llama`` is SentencePiece's BPE: tokens and scores; two
pieces merge into one of the vocabulary, that of the highest score first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ....errors import InputError
from .metadata import Metadata

_PREFIX = "tokenizer.ggml."
_TOKENS = _PREFIX + "tokens"
# Kinds of tokens, tokenizer.ggml.token_type.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
_SPACE = "▁"
# Characters of a token. Every place where it may be cut in two is tried, and each takes as long as it is.
_LONGEST_TOKEN = 4096

_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
# Patterns that text is split by.
LLAMA3 = _WORDS + r"\p{N}{1,3}" + _TAIL
QWEN2 = _WORDS + r"\p{N}" + _TAIL
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# By the names of tokenizer.ggml.pre: the patterns, one after the other.
_PATTERNS = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "smaug-bpe", "dbrx"), (LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), (QWEN2,)),
    **dict.fromkeys(("gpt-2", "gpt2", "phi-2", "mpt", "olmo"), (GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "exaone"), (r"\p{N}", GPT2)),
}
# Of these, a word that is a token is taken whole, and text begins with bos unless the file says no.
_WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "falcon3")


def token_ids(metadata: Metadata) -> dict[str, int]:
    """``bos_token_id``, ``eos_token_id`` and ``pad_token_id``, as far as the file has them.

    Raises:
        InputError: one is no token.
    """
    count, names = len(metadata.strings(_TOKENS)), (("bos", "bos"), ("eos", "eos"), ("padding", "pad"))
    found = {f"{name}_token_id": metadata.token(f"{_PREFIX}{key}_token_id", count) for key, name in names}
    return {name: id for name, id in found.items() if id is not None}


def tokenizer_files(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Names and contents of tokenizer.json, tokenizer_config.json, generation_config.json and, where there is one,
    chat_template.jinja.

    Args:
        config: config.json, token ids included.

    Raises:
        InputError: the tokenizer is of a kind that is not read, or its parts do not go together.
    """
    tokens = metadata.strings(_TOKENS)
    if any(len(token) > _LONGEST_TOKEN for token in tokens):
        raise InputError(f"{metadata.path} has a token of more than {_LONGEST_TOKEN} characters")
    kinds = _kinds(metadata, len(tokens))
    if len(tokens) > config["vocab_size"]:
        raise InputError(f"{metadata.path} has {len(tokens)} tokens, and embeddings of {config['vocab_size']}")
    bos = config.get("bos_token_id")
    model, pre = metadata.text(_PREFIX + "model"), _pre(metadata)
    begins = metadata.flag(_PREFIX + "add_bos_token", model == "llama" or pre in _WHOLE_WORDS)
    if model == "gpt2":
        parts = _byte_level(metadata, tokens, pre)
    elif model == "llama":
        parts = _sentencepiece(metadata, tokens, kinds)
    else:
        raise InputError(f"{metadata.path}: its tokenizer is of the kind {model!r}; 'gpt2' and 'llama' are read")
    named = {name: config[f"{name}_id"] for name in ("bos_token", "eos_token", "pad_token") if f"{name}_id" in config}
    special = {*named.values(), *(id for id, kind in enumerate(kinds) if kind in (CONTROL, UNKNOWN))}
    added = sorted(special | {id for id, kind in enumerate(kinds) if kind == USER_DEFINED})
    eos = config.get("eos_token_id") if metadata.flag(_PREFIX + "add_eos_token", False) else None
    parts |= {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(id, tokens[id], id in special) for id in added],
        "post_processor": _template(bos if begins else None, eos, tokens),
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
        **{name: tokens[id] for name, id in named.items()},
    }
    if UNKNOWN in kinds:
        settings["unk_token"] = tokens[kinds.index(UNKNOWN)]
    stops = [config["eos_token_id"]] if "eos_token_id" in config else []
    turn = metadata.token(_PREFIX + "eot_token_id", len(tokens))
    if turn is not None and turn not in stops:
        stops.append(turn)
    generation = {name: config[name] for name in ("bos_token_id", "pad_token_id") if name in config}
    files: dict[str, Any] = {
        "tokenizer.json": parts,
        "tokenizer_config.json": settings,
        "generation_config.json": generation | ({"eos_token_id": stops} if stops else {}),
    }
    template = metadata.text("tokenizer.chat_template", "")
    if template:
        files["chat_template.jinja"] = template
    _check(metadata, parts)
    return files


def _kinds(metadata: Metadata, count: int) -> list[int]:
    """What each token is."""
    if not metadata.has(_PREFIX + "token_type"):
        return [NORMAL] * count
    return metadata.numbers(_PREFIX + "token_type", count, "iu").tolist()


def _pre(metadata: Metadata) -> str:
    """The name of the split; BitNet's files have none, and Llama 3's tokenizer."""
    return metadata.text(_PREFIX + "pre", "llama3" if metadata.architecture.startswith("bitnet") else "none is named")


def _byte_level(metadata: Metadata, tokens: list[str], pre: str) -> dict[str, Any]:
    """Byte-level BPE, but for what all kinds have."""
    merges = metadata.strings(_PREFIX + "merges")
    if pre not in _PATTERNS:
        raise InputError(f"{metadata.path}: {_PREFIX}pre is {pre!r}; read are {', '.join(_PATTERNS)}")
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in _PATTERNS[pre]
    ]
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "normalizer": {"type": "NFC"} if pre in ("qwen2", "deepseek-r1-qwen") else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, bytes_]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "model": {
            "type": "BPE",
            "vocab": _vocabulary(metadata, tokens),
            # A token may hold a space, in files of no byte-level BPE alone.
            "merges": [merge.split(" ", 1) for merge in merges],
            "ignore_merges": pre in _WHOLE_WORDS,
        },
    }


def _sentencepiece(metadata: Metadata, tokens: list[str], kinds: list[int]) -> dict[str, Any]:
    """SentencePiece's BPE, but for what all kinds have."""
    scores = metadata.numbers(_PREFIX + "scores", len(tokens), "f")
    vocabulary = _vocabulary(metadata, tokens)
    merges: list[tuple[float, int, int, list[str]]] = []
    for token, kind, score in zip(tokens, kinds, scores.tolist(), strict=True):
        # What is no text is made of no pieces.
        if kind not in (NORMAL, USER_DEFINED, UNUSED):
            continue
        for place in range(1, len(token)):
            left, right = vocabulary.get(token[:place]), vocabulary.get(token[place:])
            if left is not None and right is not None:
                merges.append((-score, left, right, [token[:place], token[place:]]))
    merges.sort(key=lambda merge: merge[:3])
    prefix = metadata.flag(_PREFIX + "add_space_prefix", True)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    normalizers = [{"type": "Prepend", "prepend": _SPACE}, spaces] if prefix else [spaces]
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == UNKNOWN), None)
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "vocab": vocabulary,
            "merges": [pieces for *_, pieces in merges],
            "unk_token": unknown,
            "fuse_unk": True,
            "byte_fallback": BYTE in kinds,
        },
    }


def _vocabulary(metadata: Metadata, tokens: list[str]) -> dict[str, int]:
    vocabulary = {token: id for id, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        twice = next(token for id, token in enumerate(tokens) if vocabulary[token] != id)
        raise InputError(f"{metadata.path} has the token {twice!r} twice")
    return vocabulary


def _added(id: int, content: str, special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": id, "content": content, **flags, "special": special}


def _template(bos: int | None, eos: int | None, tokens: list[str]) -> dict[str, Any] | None:
    """What puts bos before a text and eos behind it, by their ids."""
    if bos is None and eos is None:
        return None

    def pieces(name: str, kind: int) -> list[dict[str, Any]]:
        before, behind = (
            [] if id is None else [{"SpecialToken": {"id": tokens[id], "type_id": kind}}] for id in (bos, eos)
        )
        return [*before, {"Sequence": {"id": name, "type_id": kind}}, *behind]

    around = {id for id in (bos, eos) if id is not None}
    special = {tokens[id]: {"id": tokens[id], "ids": [id], "tokens": [tokens[id]]} for id in around}
    return {
        "type": "TemplateProcessing",
        "single": pieces("A", 0),
        "pair": [*pieces("A", 0), *pieces("B", 1)],
        "special_tokens": special,
    }


def _check(metadata: Metadata, parts: dict[str, Any]) -> None:
    """That the tokenizers library takes it: a merge may be of what is no token."""
    from tokenizers import Tokenizer

    try:
        Tokenizer.from_str(json.dumps(parts))
    except Exception as error:
        # The library raises nothing narrower.
        raise InputError(f"{metadata.path}: its tokenizer does not go together: {error}") from error
