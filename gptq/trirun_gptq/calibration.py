"""Calibration text: from a file or a hub dataset to token sequences."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import QuantizationError
from .recipe import Recipe
from .run.quiet_hub import quiet_hub

SEPARATOR = "<|endoftext|>"  # a line of its own between the documents of a text file
PIECE = 1 << 16  # characters of a long document that are tokenized at a time
MIN_LENGTH = 32  # tokens below which a document says too little to be a sample of its own
FEWEST = 2  # sequences to calibrate on, one of them held out
COLUMNS = ("text", "messages", "conversations", "content")


def load(source: str, tokenizer: Any, recipe: Recipe, *, fewer: bool = False) -> list[Tensor]:
    """Token sequences to calibrate on: ``recipe.samples + recipe.held_out`` of them.

    Documents are taken in an order seeded by ``recipe.seed``. By default they are joined (each as the tokenizer begins
    a text, followed by its end-of-text token) and cut into sequences of exactly ``recipe.seqlen``; with
    ``recipe.natural_length`` every document is a sequence of its own, from 32 tokens up to ``seqlen``.

    Args:
        source: a ``.txt`` file (documents may be separated by a line ``<|endoftext|>``), a ``.jsonl`` file (objects
            with ``text``, or ``messages`` for chats), a ``.parquet`` file (columns of the same names), or
            ``hf:REPO[@CONFIG]:SPLIT:COLUMN`` for a dataset of the Hugging Face hub.
        tokenizer: of the model; chats go through its chat template.
        fewer: take what there is of a text that is too short, down to :data:`FEWEST` sequences; :func:`within` has the
            recipe for them.

    Returns:
        int64 tensors, [seqlen] each, or of differing lengths for ``natural_length``.

    Raises:
        QuantizationError: the source cannot be read, a line or column is missing or malformed, or there is too little
            text; one line, with the numbers.
    """
    count, seqlen = recipe.samples + recipe.held_out, recipe.seqlen
    documents = (_text(document, tokenizer, source) for document in _documents(source, recipe.seed))
    collect = _by_document if recipe.natural_length else _joined
    sequences, shortage = collect(documents, tokenizer, count, seqlen, source)
    if shortage and (not fewer or len(sequences) < FEWEST):
        raise QuantizationError(shortage)
    return sequences


def within(recipe: Recipe, sequences: int) -> Recipe:
    """The recipe for so many sequences where it asks for more: held out are at most a fifth, and one at least."""
    if sequences >= recipe.samples + recipe.held_out or sequences < FEWEST:
        return recipe
    held_out = min(recipe.held_out, max(1, sequences // 5))
    return dataclasses.replace(recipe, samples=min(recipe.samples, sequences - held_out), held_out=held_out)


def check_source(source: str) -> None:
    """What can be said against a source without reading it.

    Raises:
        QuantizationError: it is no file, not of a known kind, or not written as a hub dataset is.
    """
    if source.startswith("hf:"):
        parts = source.split(":")
        if len(parts) != 4 or not all(parts):
            raise QuantizationError(f"{source}: a hub dataset is written hf:REPO[@CONFIG]:SPLIT:COLUMN")
        return
    path = Path(source)
    if not path.is_file():
        raise QuantizationError(f"{source}: no such file; a hub dataset is written hf:REPO[@CONFIG]:SPLIT:COLUMN")
    if path.suffix not in _READERS:
        raise QuantizationError(
            f"{source}: calibration data must be a {', '.join(_READERS)} file or hf:REPO[@CONFIG]:SPLIT:COLUMN"
        )


def load_stream(source: str, tokenizer: Any, seed: int, most: int | None = None) -> Tensor:
    """All documents of a source (see :func:`load`), in an order seeded by ``seed``, joined: int64 [tokens].

    Raises:
        QuantizationError: as :func:`load`; reading stops once there are ``most`` tokens.
    """
    ids: list[int] = []
    for document in _documents(source, seed):
        ids += _tokens(_text(document, tokenizer, source), tokenizer)
        if most is not None and len(ids) >= most:
            return torch.tensor(ids[:most])
    return torch.tensor(ids)


def _joined(texts: Iterable[str], tokenizer: Any, count: int, seqlen: int, source: str) -> tuple[list[Tensor], str]:
    """Up to ``count`` sequences, and what is to be said when there are fewer."""
    sequences: list[Tensor] = []
    buffer: list[int] = []
    seen = 0
    for text in texts:
        ids = _tokens(text, tokenizer)
        seen += len(ids)
        buffer += ids
        whole = min(len(buffer) // seqlen, count - len(sequences)) * seqlen
        sequences += torch.tensor(buffer[:whole]).view(-1, seqlen)
        del buffer[:whole]
        if len(sequences) == count:
            return sequences, ""
    return sequences, (
        f"{source} holds {seen} tokens, {count} sequences of {seqlen} need {count * seqlen}; "
        "give more text, or ask for fewer or shorter sequences"
    )


def _by_document(
    texts: Iterable[str], tokenizer: Any, count: int, seqlen: int, source: str
) -> tuple[list[Tensor], str]:
    """Up to ``count`` documents, and what is to be said when there are fewer."""
    sequences: list[Tensor] = []
    seen = 0
    for text in texts:
        seen += 1
        ids = _tokens(text[: PIECE * 4], tokenizer)[:seqlen]
        if len(ids) >= MIN_LENGTH:
            sequences.append(torch.tensor(ids))
        if len(sequences) == count:
            return sequences, ""
    return sequences, (
        f"{source} holds {len(sequences)} documents of at least {MIN_LENGTH} tokens ({seen} in all), {count} are needed"
    )


def _tokens(text: str, tokenizer: Any) -> list[int]:
    """Token ids of one document, with whatever the tokenizer begins a text with, and end-of-text after it."""
    ids: list[int] = []
    for i, piece in enumerate(_pieces(text)):
        # verbose=False: a document longer than the model's context is no mistake here, it is cut afterwards.
        ids += tokenizer(piece, add_special_tokens=i == 0, verbose=False)["input_ids"]
    end = tokenizer.eos_token_id
    return ids if end is None or (ids and ids[-1] == end) else [*ids, end]


def _pieces(text: str) -> Iterator[str]:
    """A long text cut at line ends, so that tokenizing stays linear in its length."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + PIECE) + 1
        end = end or len(text)
        yield text[start:end]
        start = end


def _text(document: Any, tokenizer: Any, source: str) -> str:
    """A document as text: strings as they are, chats through the tokenizer's template."""
    text = document if isinstance(document, str) else _rendered(document, tokenizer, source)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise QuantizationError(f"{source}: a document has half a character, which is no text") from None
    return text


def _rendered(document: Any, tokenizer: Any, source: str) -> str:
    if isinstance(document, list) and all(isinstance(turn, dict) for turn in document):
        if not getattr(tokenizer, "chat_template", None):
            raise QuantizationError(f"{source} holds chat messages, and this model's tokenizer has no chat template")
        try:
            return str(tokenizer.apply_chat_template(document, tokenize=False))
        except Exception as error:
            # A template is a program of the model's author and may raise anything.
            raise QuantizationError(f"{source}: the chat template refuses a conversation: {error}") from None
    raise QuantizationError(f"{source}: a document must be text or a list of messages, got {type(document).__name__}")


def _documents(source: str, seed: int) -> Iterable[Any]:
    check_source(source)
    if source.startswith("hf:"):
        return _from_hub(source, seed)
    path = Path(source)
    documents = _READERS[path.suffix](path)
    random.Random(seed).shuffle(documents)
    return documents


def _from_text(path: Path) -> list[Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise QuantizationError(f"{path}: not UTF-8 text (byte {error.start})") from None
    documents = ("\n" + text + "\n").split(f"\n{SEPARATOR}\n")
    documents = [document.strip("\n") for document in documents if document.strip()]
    # One long text is shuffled in pieces, or the sample would be its first pages only.
    return [piece for document in documents for piece in _pieces(document)] if len(documents) == 1 else documents


def _from_jsonl(path: Path) -> list[Any]:
    documents = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
            except UnicodeDecodeError as error:
                raise QuantizationError(f"{path} line {number}: not UTF-8 text (byte {error.start})") from None
            except (ValueError, RecursionError) as error:
                raise QuantizationError(
                    f"{path} line {number}: not valid JSON ({getattr(error, 'msg', error)})"
                ) from None
            column = next((name for name in COLUMNS if isinstance(entry, dict) and name in entry), None)
            if column is None:
                found = ", ".join(entry) if isinstance(entry, dict) else type(entry).__name__
                raise QuantizationError(f"{path} line {number}: no field {' or '.join(COLUMNS[:2])} (found: {found})")
            documents.append(entry[column])
    return documents


def _from_parquet(path: Path) -> list[Any]:
    import pyarrow
    import pyarrow.parquet

    try:
        names = pyarrow.parquet.read_schema(path).names
        column = next((name for name in COLUMNS if name in names), None)
        if column is None:
            raise QuantizationError(f"{path}: no column {' or '.join(COLUMNS[:2])} (found: {', '.join(names)})")
        return pyarrow.parquet.read_table(path, columns=[column]).column(0).to_pylist()
    except pyarrow.ArrowException as error:
        raise QuantizationError(f"{path}: not a readable parquet file ({str(error).splitlines()[0]})") from None


def _from_hub(source: str, seed: int) -> Iterator[Any]:
    parts = source.split(":")
    repo, _, config = parts[1].partition("@")
    from datasets import load_dataset

    try:
        # Streaming reads only as many shards as the sample needs.
        with quiet_hub():
            dataset = load_dataset(repo, config or None, split=parts[2], streaming=True)
            rows = iter(dataset.shuffle(seed=seed, buffer_size=1000))
        while True:
            with quiet_hub():
                row = next(rows, None)
            if row is None:
                return
            if parts[3] not in row:
                raise QuantizationError(f"{source}: no column {parts[3]} (found: {', '.join(row)})")
            yield row[parts[3]]
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error, QuantizationError):
            raise
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise QuantizationError(f"{source}: {first}") from None


_READERS = {".txt": _from_text, ".jsonl": _from_jsonl, ".parquet": _from_parquet}
