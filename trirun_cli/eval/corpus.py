"""The texts that perplexity is measured on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import InputError
from ..text.detokenizer import read_text_and_bytes

RAW_TEST = "wiki.test.raw"
# Of the test split as released by its authors.
RAW_TEST_SHA256 = "173c87a53759e0201f33e0ccf978e510c2042d7f2cb78229d9a50d79b9e7dd08"


@dataclass(frozen=True, slots=True)
class Corpus:
    """A text to be cut into windows.

    Attributes:
        name: for people. text: whole. sha256: of the file's bytes, None from the hub.
        warning: why the text may not be the expected one, or None.
    """

    name: str
    text: str
    sha256: str | None
    warning: str | None = None


def text_corpus(path: Path | None) -> Corpus:
    """A text file, or the excerpt that ships with the demo model.

    Raises:
        InputError: it is missing or not UTF-8.
    """
    text, name, content = read_text_and_bytes(path)
    return Corpus(name, text, hashlib.sha256(content).hexdigest())


def wikitext2(directories: Sequence[Path]) -> Corpus:
    """WikiText-2's raw test split, joined as the GPTQ paper's code joins it.

    That code reads the split from the hub, where each line of the file is a row that keeps its newline, or is empty if
    the line is blank, and puts two newlines between rows. The text is therefore not the file's: Llama 2's tokenizer
    makes 341,469 tokens of it (the number in the literature) and 335,688 of the file.

    Args:
        directories: searched for ``wiki.test.raw``, also in ``wikitext2`` and ``wikitext-2-raw`` below; an entry may be
            the file itself. If empty, the text comes from the hub.

    Raises:
        InputError: the file is missing or not UTF-8, or the hub cannot be reached.
    """
    if not directories:
        return Corpus("wikitext-2-raw-v1 test", join_rows(_hub_rows()), None)
    for directory in directories:
        places = [directory] if directory.name == RAW_TEST else []
        places += [directory / below / RAW_TEST for below in ("", "wikitext2", "wikitext-2-raw")]
        for file in places:
            if file.is_file():
                text, _, content = read_text_and_bytes(file)
                digest = hashlib.sha256(content).hexdigest()
                odd = None if digest == RAW_TEST_SHA256 else f"{file} is not the official raw test split (its SHA-256)"
                return Corpus(f"{RAW_TEST}, rows joined", join_rows(file_rows(text)), digest, odd)
    raise InputError(f"wikitext2: no {RAW_TEST} in {', '.join(map(str, directories))}")


def file_rows(text: str) -> list[str]:
    """The rows that the hub's data set has for the lines of the file."""
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    return [f"{line}\n" if line.strip() else "" for line in lines]


def join_rows(rows: list[str]) -> str:
    """The rows as one text (GPTQ's ``datautils.py``)."""
    return "\n\n".join(rows)


def _hub_rows() -> list[str]:
    from datasets import load_dataset
    from trirun_gptq.run.quiet_hub import quiet_hub

    try:
        with quiet_hub():
            return list(load_dataset("Salesforce/wikitext", "wikitext-2-raw-v1", split="test")["text"])
    except Exception as error:
        # The hub's libraries raise many kinds of errors; the fix is the same for all.
        reason = " ".join(str(error).split())
        raise InputError(
            f"wikitext2 cannot be loaded from the hub ({type(error).__name__}: {reason[:200]})",
            f"--data-dir names a folder with {RAW_TEST}",
        ) from error
