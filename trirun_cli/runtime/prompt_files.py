"""Files of prompts and of answers, one a line."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ..errors import InputError, UsageError


@dataclass(frozen=True, slots=True)
class PromptLine:
    """A prompt of a file. ``index`` counts them from 0; ``id`` is the file's own name for it, or None."""

    index: int
    text: str
    id: Any = None


def read_prompts(path: Path) -> list[PromptLine]:
    """The prompts of a file; - is standard input. Blank lines are none.

    Args:
        path: each line is a prompt; in a file that ends in .jsonl, an object with "prompt" and perhaps "id".

    Raises:
        InputError: the file is missing, not UTF-8, or a line is not what it should be.
    """
    try:
        content = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text: {error}") from error
    # Only these end a line: str.splitlines would also cut at characters that belong to a prompt.
    lines = [(number, line.rstrip("\r")) for number, line in enumerate(content.split("\n"), 1) if line.strip()]
    if path.suffix != ".jsonl":
        return [PromptLine(index, line) for index, (_, line) in enumerate(lines)]
    prompts = []
    for index, (number, line) in enumerate(lines):
        try:
            value = json.loads(line)
        except ValueError as error:
            raise InputError(f"{path}:{number}: not JSON: {error}") from error
        if not isinstance(value, dict) or not isinstance(value.get("prompt"), str):
            raise InputError(f'{path}:{number}: not an object with a text under "prompt"')
        prompts.append(PromptLine(index, value["prompt"], value.get("id")))
    return prompts


class AnswerFile:
    """Answers as JSON lines, each written whole as soon as it is there, so that a run can be taken up again.

    Args:
        path: the file; None is standard output, which holds nothing yet.
        settings: what answers depend on besides their prompts; a digest of it is in every line.
        resume: keep what the file holds. overwrite: replace it when the first answer comes.
        kept_back: write nothing to standard output; the answers are in ``answers`` only.

    Raises:
        UsageError: the file is there and neither is asked for, or it was written with other settings.
        InputError: it is not a file of answers.
    """

    def __init__(
        self,
        path: Path | None,
        settings: Any,
        *,
        resume: bool = False,
        overwrite: bool = False,
        kept_back: bool = False,
    ) -> None:
        self._kept_back = path is None and kept_back
        self._path, self._kept = path, 0
        self._file: IO[str] | None = None
        self._digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:12]
        self.answers: dict[int, dict[str, Any]] = {}
        if path is None or not path.exists() or path.stat().st_size == 0:
            return
        if resume:
            self._read(path)
        elif not overwrite:
            raise UsageError(f"{path} exists", "--resume continues it, --overwrite replaces it")

    def check(self, prompts: list[PromptLine]) -> None:
        """Raises InputError when an answer that is kept belongs to another prompt than this file's."""
        for index, answer in self.answers.items():
            if index >= len(prompts) or prompts[index].text != answer.get("prompt"):
                raise InputError(f"{self._path}: answer {index} is to another prompt than the prompts file has there")

    def add(self, prompt: PromptLine, answer: dict[str, Any]) -> None:
        """Write an answer, with the prompt and its place in the file."""
        named = {} if prompt.id is None else {"id": prompt.id}
        entry = {"index": prompt.index, **named, "prompt": prompt.text, **answer, "settings": self._digest}
        self.answers[prompt.index] = entry
        if self._kept_back:
            return
        file = self._open()
        file.write(json.dumps(entry, ensure_ascii=False) + "\n")
        file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _open(self) -> IO[str]:
        if self._path is None:
            return sys.stdout
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self._path, "a", encoding="utf-8")  # noqa: SIM115 (stays open while the run lasts)
            self._file.truncate(self._kept)
        return self._file

    def _read(self, path: Path) -> None:
        content = path.read_bytes()
        # A line that a killed run left half-written is no answer; the first new one takes its place.
        self._kept = content.rfind(b"\n") + 1
        for number, line in enumerate(content[: self._kept].splitlines(), 1):
            try:
                entry = json.loads(line)
                index, settings = entry["index"], entry["settings"]
            except (ValueError, TypeError, KeyError) as error:
                raise InputError(f"{path}:{number} is not an answer of trirun generate") from error
            if settings != self._digest:
                raise UsageError(
                    f"{path} was written with other settings", "name another --out, or use the same options"
                )
            self.answers[index] = entry
