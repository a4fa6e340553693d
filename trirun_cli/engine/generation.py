"""What a model directory says of generation: its end-of-text ids and its defaults for sampling."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ..checkpoint.model_dir import read_config, read_json
from ..errors import InputError

# Entries of generation_config.json that say how to sample.
SAMPLING_NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def stop_ids(path: str | os.PathLike[str]) -> set[int]:
    """End-of-text ids of a model directory, from generation_config.json or else config.json.

    Raises:
        InputError: see :func:`generation_defaults`; or they are no ids.
    """
    ids = generation_defaults(path).get("eos_token_id", read_config(Path(path)).get("eos_token_id"))
    found = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not all(isinstance(id, int) for id in found):
        raise InputError(f"{os.fspath(path)}: eos_token_id is {ids!r}, not token ids")
    return set(found)


def generation_defaults(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The generation_config.json of a model directory, or nothing.

    Raises:
        InputError: there is no model directory, or the file is damaged.
    """
    read_config(Path(path))
    file = Path(path) / "generation_config.json"
    found = read_json(file) if file.is_file() else {}
    for name in SAMPLING_NAMES:
        if not isinstance(found.get(name), int | float | None):
            raise InputError(f"{file}: {name} is {found[name]!r}, not a number")
    if isinstance(found.get("top_k"), float):
        raise InputError(f"{file}: top_k is {found['top_k']!r}, not a count")
    return found


def sampling_defaults(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Fields of :class:`.sampling.SamplingParams` that a model directory asks for: those of its generation_config.json
    where that samples, with a temperature of 1 unless it says another; else none, which is greedy.

    Raises:
        InputError: see :func:`generation_defaults`.
    """
    said = generation_defaults(path)
    if not said.get("do_sample"):
        return {}
    return {"temperature": 1.0} | {name: said[name] for name in SAMPLING_NAMES if said.get(name) is not None}
