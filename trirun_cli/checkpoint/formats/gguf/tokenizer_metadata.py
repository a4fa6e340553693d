"""A tokenizer as GGUF metadata, from tokenizer.json and tokenizer_config.json.

llama.cpp has its own implementation of each kind: ``gpt2`` is byte-level BPE by merges, whose pattern that splits text
has a name (``pre``) and must be one that llama.cpp knows; ``llama`` is SentencePiece's BPE by scores. Where the merges
come from such scores, their order is what the scores are recovered from.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ....errors import InputError
from ...model_dir import read_json
from .tokenizer import BYTE, CONTROL, GPT2, LLAMA3, NORMAL, QWEN2, UNKNOWN, UNUSED, USER_DEFINED

# The pattern of a tokenizer.json to llama.cpp's name for it.
SPLITS = {
    LLAMA3: "llama-bpe",
    QWEN2: "qwen2",
    QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"): "qwen35",
    GPT2: "gpt-2",
    GPT2.replace("'s|'t|'re|'ve|'m|'ll|'d", "'(?:[sdmt]|ll|ve|re)"): "gpt-2",
}


def tokenizer_metadata(directory: Path, config: dict[str, Any], pre: str | None = None) -> dict[str, Any]:
    """What a GGUF file says of the tokenizer of a model directory.

    Args:
        directory: with tokenizer.json. config: its config.json, for the special tokens and the size of the vocabulary,
            which is the embedding's. pre: llama.cpp's name of the pattern that splits text; None finds it.

    Raises:
        InputError: there is no tokenizer.json, or it is damaged; its kind is none of llama.cpp's, its pattern has no
            name there, or it has a token that the embedding does not have.
    """
    document = read_json(directory / "tokenizer.json")
    found = document.get("model")
    model: dict[str, Any] = found if isinstance(found, dict) else {}
    kind = model.get("type")
    if kind != "BPE":
        raise InputError(f"{directory}: llama.cpp's kinds of tokenizer do not hold a {kind!r} model")
    _check(directory)
    pieces, types = _tokens(directory, document, model, config["vocab_size"])
    if model.get("byte_fallback"):
        known = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default"}
        extra: dict[str, Any] = {
            "tokenizer.ggml.scores": _scores(model, pieces),
            "tokenizer.ggml.add_space_prefix": _adds_space(document),
        }
    else:
        known = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre or _split_name(directory, document)}
        merges = model.get("merges") or ()
        extra = {"tokenizer.ggml.merges": [pair if isinstance(pair, str) else " ".join(pair) for pair in merges]}
    tokens = {"tokenizer.ggml.tokens": pieces, "tokenizer.ggml.token_type": types}
    special = _special_tokens(directory, config, document, pieces)
    return known | tokens | extra | special


def _check(directory: Path) -> None:
    """That the tokenizers library takes tokenizer.json: its parts are of the right kinds then."""
    from tokenizers import Tokenizer

    try:
        Tokenizer.from_file(str(directory / "tokenizer.json"))
    # The library raises nothing narrower.
    except Exception as error:
        raise InputError(f"{directory / 'tokenizer.json'} cannot be read: {error}") from error


def _tokens(directory: Path, document: dict[str, Any], model: dict[str, Any], size: int) -> tuple[list[str], list[int]]:
    """Every id's piece and type; ids of the embedding without a piece are unused."""
    ids = dict(model.get("vocab") or {})
    added = {token["content"]: token for token in document.get("added_tokens") or ()}
    ids |= {content: token["id"] for content, token in added.items()}
    if max(ids.values(), default=0) >= size:
        piece = max(ids, key=ids.__getitem__)
        raise InputError(f"{directory}: its token {piece!r} has the id {ids[piece]}, the embedding {size} rows")
    pieces, types = [f"[PAD{index}]" for index in range(size)], [UNUSED] * size
    for piece, index in ids.items():
        pieces[index] = piece
        if piece in added:
            types[index] = CONTROL if added[piece].get("special") else USER_DEFINED
        elif model.get("byte_fallback") and len(piece) == 6 and piece.startswith("<0x"):
            types[index] = BYTE
        elif piece != f"[PAD{index}]":
            types[index] = NORMAL
        if piece == model.get("unk_token"):
            types[index] = UNKNOWN
    return pieces, types


def _scores(model: dict[str, Any], pieces: list[str]) -> list[float]:
    """Scores in whose order llama.cpp merges as the merges say: less the rank of the first merge that makes a piece."""
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(model.get("merges") or ()):
        left, right = pair.split(" ") if isinstance(pair, str) else pair
        ranks.setdefault(left + right, rank)
    # llama.cpp merges whatever two pieces make a third; what no merge makes comes after all that one does.
    return [-float(ranks.get(piece, len(ranks) + 1)) for piece in pieces]


def _split_name(directory: Path, document: dict[str, Any]) -> str:
    """llama.cpp's name of the pattern by which a byte-level tokenizer splits text."""
    section = document.get("pre_tokenizer") or {}
    steps = section.get("pretokenizers") or [section]
    patterns = [(step.get("pattern") or {}).get("Regex") for step in steps if step.get("type") == "Split"]
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"] and section.get("use_regex", True):
        return "gpt-2"
    if kinds == ["Split", "ByteLevel"] and patterns[0] in SPLITS:
        return SPLITS[patterns[0]]
    found = patterns[0] if patterns else ", ".join(map(str, kinds))
    raise InputError(
        f"{directory}: its tokenizer splits text by {found!r}, which has no name in llama.cpp",
        "--pre NAME writes the name of a pattern that is close enough, for example gpt-2",
    )


def _adds_space(document: dict[str, Any]) -> bool:
    """Whether a SentencePiece tokenizer puts a space before the text."""
    text = str(document.get("normalizer")) + str(document.get("pre_tokenizer"))
    return "'Prepend'" in text or "'prepend_scheme': 'always'" in text or "'prepend_scheme': 'first'" in text


def _special_tokens(
    directory: Path, config: dict[str, Any], document: dict[str, Any], pieces: list[str]
) -> dict[str, Any]:
    """Ids of special tokens, whether texts begin with one, and the chat template."""
    settings = read_json(directory / "tokenizer_config.json") if (directory / "tokenizer_config.json").is_file() else {}
    found: dict[str, Any] = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        token = settings.get(f"{name}_token")
        token = token.get("content") if isinstance(token, dict) else token
        own = config.get(f"{name}_token_id")
        own = own[0] if isinstance(own, list) and own else own
        index = pieces.index(token) if token in pieces else own
        if type(index) is int and 0 <= index < len(pieces):
            found[f"tokenizer.ggml.{key}_token_id"] = index
    begins = _first_token(document)
    if begins is None:
        begins = bool(settings.get("add_bos_token", False))
    found["tokenizer.ggml.add_bos_token"] = bool(begins)
    template = settings.get("chat_template")
    if (directory / "chat_template.jinja").is_file():
        template = (directory / "chat_template.jinja").read_text(encoding="utf-8")
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict)]
        template = next((entry.get("template") for entry in named if entry.get("name") == "default"), None)
    if not isinstance(template, str):
        return found
    try:
        template.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{directory}: its chat template is not Unicode: {error}") from None
    return found | {"tokenizer.chat_template": template}


def _first_token(document: dict[str, Any]) -> bool | None:
    """Whether the tokenizer puts a special token before a text; None where it does not say."""
    section = document.get("post_processor") or {}
    for step in section.get("processors") or [section]:
        if step.get("type") == "TemplateProcessing" and step.get("single"):
            return "SpecialToken" in step["single"][0]
    return None
