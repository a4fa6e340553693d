"""Finished requests on disk, so that an interrupted evaluation continues where it stopped."""

from __future__ import annotations

import fcntl
import hashlib
import json
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..checkpoint.model_dir import ModelDir
from ..errors import InputError

SCHEMA = "trirun.eval.requests/1"
# Seconds between writes: the work that a crash can lose.
FLUSH_S = 5.0


class RequestCache:
    """Results of requests in a JSON-lines file, each under a digest of the tokens it asks about.

    The first line holds what the results depend on besides the tokens: the model's files, what runs it, the versions.
    A file with another first line is refused, never reused or overwritten. Tasks and their settings need not be in it:
    they change the tokens.

    Args:
        path: the file; its folder is made if missing.
        identity: what the results depend on, JSON values.

    Raises:
        InputError: the file is of another model or setting, is damaged, or is in use by another run.
    """

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        self._results: dict[str, Any] = {}
        self._written = time.monotonic()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a+", encoding="utf-8")  # noqa: SIM115 (stays open while the run lasts)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise InputError(f"{path} is in use by another run") from error
        self._file.seek(0)
        self._read(path, json.loads(json.dumps(identity)))
        self.found = len(self._results)

    def get(self, kind: str, *tokens: Sequence[int]) -> Any:
        """The result of a request of this kind about these tokens, or None."""
        return self._results.get(_digest(kind, tokens))

    def put(self, kind: str, *tokens: Sequence[int], value: Any) -> None:
        """Keep a result, a JSON value."""
        key = _digest(kind, tokens)
        self._results[key] = value
        self._file.write(json.dumps([key, value]) + "\n")
        if time.monotonic() - self._written > FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Write everything to the file."""
        self._file.flush()
        self._written = time.monotonic()

    def close(self) -> None:
        """Close the file; another run may then use it."""
        self._file.close()

    def _read(self, path: Path, identity: dict[str, Any]) -> None:
        content = self._file.read()
        # Drop a line that a killed run left half-written; the next one would be appended to it.
        whole = content[: content.rfind("\n") + 1]
        if len(whole) < len(content):
            self._file.truncate(len(whole.encode()))
        lines = whole.splitlines()
        if not lines:
            self._file.write(json.dumps({"schema": SCHEMA, **identity}) + "\n")
            self.flush()
            return
        for number, line in enumerate(lines, 1):
            try:
                entry = json.loads(line)
                if number == 1:
                    _same(path, entry, {"schema": SCHEMA, **identity})
                else:
                    key, self._results[key] = entry
            except (ValueError, TypeError, RecursionError) as error:
                raise InputError(f"{path}:{number}: damaged; delete the file to start over") from error


def _same(path: Path, found: Any, wanted: dict[str, Any]) -> None:
    if not isinstance(found, dict):
        raise ValueError("not an object")
    for name in wanted | found:
        if found.get(name) != wanted.get(name):
            raise InputError(
                f"{path} was written for another {name}: {found.get(name)} there, {wanted.get(name)} here",
                "give --resume another directory, or delete this file",
            )


def _digest(kind: str, parts: Sequence[Sequence[int]]) -> str:
    state = hashlib.blake2b(kind.encode(), digest_size=16)
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(array("q", part).tobytes())
    return state.hexdigest()


def model_digest(path: Path) -> str:
    """SHA-256 of the names and contents of the files that determine what a model directory computes."""
    state = hashlib.sha256()
    names = ("config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "chat_template.jinja")
    others = [path / name for name in names if (path / name).is_file()]
    for file in sorted([*others, *ModelDir(path).files]):
        with file.open("rb") as stream:
            state.update(file.name.encode() + b"\0" + hashlib.file_digest(stream, "sha256").digest())
    return state.hexdigest()
