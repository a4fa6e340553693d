"""Files of prompts and of answers, one a line."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from trirun_kernels.weights.durable import flush, publish_file

from ..checkpoint.model_dir import ModelDir
from ..checkpoint.writer import RECIPE_FILE
from ..engine.sampling import SamplingParams
from ..errors import InputError, UsageError, writing

# What decides a model's answers besides its weights; and how many bytes of a file are read, at how many places.
_IDENTIFYING = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template.jinja", RECIPE_FILE),
)
_SAMPLE, _SAMPLES = 2**14, 64
# What a line may say of its own sampling, in place of the options: the types of SamplingParams' fields.
_PARAMS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("max_tokens", "top_k", "seed"), (int,)),
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), (int, float)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), (int, float)),
    "stop": (str, list),
}


@dataclass(frozen=True, slots=True)
class PromptLine:
    """A prompt of a file.

    Attributes:
        index: counts them from 0. text: the prompt. id: the file's own name for it, or None.
        params: what its line says of :class:`~trirun_cli.engine.sampling.SamplingParams`, by the names of the fields.
        unused: names of further fields of its line.
    """

    index: int
    text: str
    id: Any = None
    params: dict[str, Any] = field(default_factory=dict)
    unused: tuple[str, ...] = ()


def read_prompts(path: Path) -> list[PromptLine]:
    """The prompts of a file; - is standard input. Blank lines are none.

    Args:
        path: each line is a prompt; in a file that ends in .jsonl, an object with "prompt" and perhaps "id" and
            sampling parameters, as "max_tokens" and "temperature"; null is as absent.

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
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}:{number}: not JSON: {error}") from error
        if not isinstance(value, dict) or not isinstance(value.get("prompt"), str):
            raise InputError(f'{path}:{number}: not an object with a text under "prompt"')
        try:
            value["prompt"].encode()
        except UnicodeEncodeError as error:
            raise InputError(f"{path}:{number}: half a character, which is no text: {error}") from error
        params = _params(value, f"{path}:{number}")
        unused = tuple(name for name in value if name not in ("prompt", "id", *_PARAMS))
        prompts.append(PromptLine(index, value["prompt"], value.get("id"), params, unused))
    return prompts


def _params(line: dict[str, Any], where: str) -> dict[str, Any]:
    """The sampling parameters of a line, with values that they may have."""
    found = {name: line[name] for name in _PARAMS if line.get(name) is not None}
    for name, value in found.items():
        # type(), not isinstance: true is no number.
        if type(value) not in _PARAMS[name]:
            raise InputError(f"{where}: {name} is {value!r}")
    if "stop" in found:
        texts = [found["stop"]] if isinstance(found["stop"], str) else found["stop"]
        if not all(isinstance(text, str) for text in texts):
            raise InputError(f"{where}: stop is {found['stop']!r}, neither a text nor a list of texts")
        found["stop"] = tuple(texts)
    try:
        SamplingParams(**found)
    except UsageError as error:
        raise InputError(f"{where}: {error}") from None
    return found


class AnswerFile:
    """Answers as JSON lines, each written whole as soon as it is there, so that a run can be taken up again.

    Args:
        path: the file; None is standard output, which holds nothing yet.
        settings: what answers depend on besides their prompts; a digest of it is in every line.
        resume: keep what the file holds, but for refusals, which are no answers. overwrite: replace it when the first
            answer comes.
        kept_back: write nothing to standard output; the answers are in ``answers`` only.

    Raises:
        UsageError: the file is there and neither is asked for, or it was written with other settings.
        InputError: it is not a file of answers, or another run is writing to it.
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
        self._path, self._printed = path, path is None and not kept_back
        self._digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:12]
        self.answers: dict[int, dict[str, Any]] = {}
        self._file: IO[bytes] | None = None
        # What the file shall hold before the first new answer, where that is not what it holds.
        self._kept: bytes | None = None
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        # Opened before anything is computed, so that a place which cannot be written to is known at once.
        self._file = _locked(path)
        try:
            self._kept = self._begin(path, resume, overwrite)
        except BaseException:
            self.close()
            raise

    def check(self, prompts: list[PromptLine]) -> None:
        """Raises InputError when an answer that is kept belongs to another prompt than this file's, or to the same with
        other parameters."""
        for index, answer in self.answers.items():
            if index >= len(prompts) or prompts[index].text != answer.get("prompt"):
                raise InputError(f"{self._path}: answer {index} is to another prompt than the prompts file has there")
            if answer.get("params", {}) != _plain(prompts[index].params):
                raise InputError(f"{self._path}: answer {index} is of other parameters than the prompts file has there")

    def add(self, prompt: PromptLine, answer: dict[str, Any]) -> None:
        """Write an answer, with the prompt and its place in the file."""
        named = {} if prompt.id is None else {"id": prompt.id}
        params = {"params": _plain(prompt.params)} if prompt.params else {}
        entry = {"index": prompt.index, **named, "prompt": prompt.text, **params, **answer, "settings": self._digest}
        self.answers[prompt.index] = entry
        line = json.dumps(entry, ensure_ascii=False) + "\n"
        if self._printed:
            sys.stdout.write(line)
            sys.stdout.flush()
        if self._file is not None:
            with writing(self._path):
                self.settle()
                self._file.write(line.encode())
                self._file.flush()

    def settle(self) -> None:
        """Make the file hold what is kept of it, and no more; :meth:`add` does it too."""
        if self._path is None or self._file is None or self._kept is None:
            return
        if not self._kept:
            self._file.truncate(0)
        else:
            # A run that is killed here leaves the file as it was.
            place = self._path.resolve()
            beside = place.with_name(f".{place.name}.new")
            beside.unlink(missing_ok=True)
            with self._file:
                self._file = _locked(beside)
                self._file.write(self._kept)
                self._file.flush()
                publish_file(beside, place)
        self._kept = None

    def close(self) -> None:
        """Close the file; an empty one is removed, but no device or pipe."""
        if self._file is not None and self._path is not None:
            if self._path.is_file() and self._path.stat().st_size == 0:
                self._path.unlink()
            elif self._path.is_file():
                flush(self._path)
            self._file.close()

    def _begin(self, path: Path, resume: bool, overwrite: bool) -> bytes | None:
        """What is kept of the file, None for all of it."""
        if path.stat().st_size == 0:
            return None
        if resume:
            return self._read(path)
        if not overwrite:
            raise UsageError(f"{path} exists", "--resume continues it, --overwrite replaces it")
        return b""

    def _read(self, path: Path) -> bytes | None:
        content, kept = path.read_bytes(), []
        # A line that a killed run left half-written is no answer; the first new one takes its place.
        for number, line in enumerate(content.split(b"\n")[:-1], 1):
            try:
                entry = json.loads(line)
                index, settings = entry["index"], entry["settings"]
                if type(index) is not int or index < 0:
                    raise ValueError(f"index {index!r}")
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                raise InputError(f"{path}:{number} is not an answer of trirun generate") from error
            if settings != self._digest:
                raise UsageError(
                    f"{path} was written with other settings", "name another --out, or use the same options"
                )
            if "error" not in entry:
                self.answers[index] = entry
                kept.append(line + b"\n")
        left = b"".join(kept)
        return None if left == content else left


def _plain(params: dict[str, Any]) -> dict[str, Any]:
    """As JSON gives them back."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in params.items()}


def _locked(path: Path) -> IO[bytes]:
    file = open(path, "ab")  # noqa: SIM115 (stays open while the run lasts)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise InputError(f"{path} is in use by another run") from error
    return file


def model_identity(path: Path) -> str:
    """A digest of what a model answers from; of large files, of samples alone.

    Raises:
        InputError: it is no model directory, or its weights are damaged.
    """
    state = hashlib.sha256()
    small = [path / name for name in _IDENTIFYING if (path / name).is_file()]
    for file in small + ModelDir(path).files:
        with open(file, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            state.update(f"{file.name}\0{size}\0".encode())
            for start in range(0, size, max(_SAMPLE, size // _SAMPLES)):
                stream.seek(start)
                state.update(stream.read(_SAMPLE))
    return state.hexdigest()
