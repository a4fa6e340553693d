"""Reading a Hugging Face model directory: its config and, lazily, its safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import InputError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class ModelDir:
    """A directory with config.json and safetensors weights, single or sharded, memory-mapped on access.

    Raises:
        InputError: the directory, its config or one of its weight files is missing or unreadable.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config: dict[str, Any] = read_config(self.path)
        self._files: dict[str, Any] = {}
        self._where = self._locate()

    def __contains__(self, name: object) -> bool:
        return name in self._where

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def names(self) -> list[str]:
        """Every tensor's name, sorted."""
        return sorted(self._where)

    @property
    def files(self) -> list[Path]:
        """The weight files, in order."""
        return [self.path / name for name in sorted(set(self._where.values()))]

    @property
    def quant_method(self) -> str | None:
        """``quantization_config.quant_method`` of config.json, or None for an unquantized model."""
        return quant_method(self.config)

    def tensor(self, name: str) -> Any:
        """The tensor of that name; on the CPU its bytes stay in the mapped file until they are touched."""
        if name not in self._where:
            raise InputError(f"{self.path}: there is no tensor {name}")
        return self._file(self._where[name]).get_tensor(name)

    def meta(self, name: str) -> tuple[list[int], str]:
        """Shape and safetensors dtype ("F16", "I32", ...) of a tensor, read from the header alone."""
        view = self._file(self._where[name]).get_slice(name)
        return view.get_shape(), view.get_dtype()

    def _file(self, name: str) -> Any:
        if name not in self._files:
            self._files[name] = open_safetensors(self.path / name)
        return self._files[name]

    def _locate(self) -> dict[str, str]:
        if (stored := weight_map(self.path)) is not None:
            where = stored
        elif (self.path / SINGLE).is_file():
            where = dict.fromkeys(self._file(SINGLE).keys(), SINGLE)
        else:
            other = next((p.name for p in self.path.glob("*.bin")), None)
            hint = f"; {other} is a pickle: save the model with safe_serialization=True" if other else ""
            raise InputError(f"{self.path} has no {SINGLE} and no {INDEX}{hint}")
        for file in sorted(set(where.values())):
            held = set(self._file(file).keys())
            lost = next((name for name, place in where.items() if place == file and name not in held), None)
            if lost is not None:
                raise InputError(f"{self.path / file} does not hold {lost}, which the index says it does")
        return where


def read_config(path: Path) -> dict[str, Any]:
    """The config.json of a model directory.

    Raises:
        InputError: there is no such directory, or it is not one of a model.
    """
    if not path.exists():
        raise InputError(f"{path}: no such directory")
    if not path.is_dir():
        raise InputError(f"{path} is a file; a model is a directory with config.json and safetensors files")
    if not (path / "config.json").is_file():
        raise InputError(f"{path} is not a model directory: it has no config.json")
    return read_json(path / "config.json")


def quant_method(config: dict[str, Any]) -> str | None:
    """``quantization_config.quant_method`` of a config.json, or None for an unquantized model."""
    section = config.get("quantization_config")
    if section is None:
        return None
    return str(section.get("quant_method")) if isinstance(section, dict) else "unknown"


def weight_map(path: Path) -> dict[str, str] | None:
    """Tensor name to file name, by the index of a sharded model; None where there is no index.

    Raises:
        InputError: the index is damaged, or names a file that is not in the directory itself.
    """
    if not (path / INDEX).is_file():
        return None
    where = read_json(path / INDEX).get("weight_map")
    if not isinstance(where, dict) or not where or not all(isinstance(file, str) for file in where.values()):
        raise InputError(f"{path / INDEX} has no weight_map of file names")
    if outside := [file for file in where.values() if Path(file).name != file or file in ("", "..")]:
        raise InputError(f"{path / INDEX} names {outside[0]!r}, which is no file of its directory")
    return where


def weight_files(path: Path) -> list[Path]:
    """Where the safetensors files of a model directory, single or sharded, are to be; they are not looked for.

    Raises:
        InputError: the index is damaged.
    """
    where = weight_map(path)
    return [path / name for name in ([SINGLE] if where is None else sorted(set(where.values())))]


def open_safetensors(path: Path) -> Any:
    """A memory-mapped safetensors file.

    Raises:
        InputError: it is missing, truncated, or not safetensors.
    """
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise InputError(f"{path} is missing")
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise InputError(f"{path} is truncated or not a safetensors file ({error})") from error
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        InputError: it is missing, not JSON, or not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise InputError(f"{path} holds {type(value).__name__}, not a JSON object")
    return value
