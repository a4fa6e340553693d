"""A Hugging Face model directory: its config.json and its tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from trirun_kernels.weights.safetensors_dir import SafetensorsDir
from trirun_kernels.weights.safetensors_file import StoredTensor, TensorFileError

from ..errors import InputError, explain
from .hub import local_model

if TYPE_CHECKING:
    from torch import Tensor


# The key of config.json under which MLX says how a model is packed.
MLX_SECTION = "quantization"


class ModelSource(Protocol):
    """What a checkpoint is made of: a model directory, or a file that stands for one.

    Attributes:
        config: config.json. path: a directory with config.json, tokenizer and the like.
    """

    config: dict[str, Any]
    path: Path

    @property
    def names(self) -> list[str]:
        """Every tensor's name, sorted."""

    @property
    def files(self) -> list[Path]:
        """The files that hold them."""

    @property
    def quant_method(self) -> str | None:
        """``quantization_config.quant_method`` of config.json, or None."""

    def __contains__(self, name: object) -> bool:
        """Whether there is a tensor of that name."""

    def __getitem__(self, name: str) -> StoredTensor:
        """Where a tensor lies, and what it is."""

    def tensor(self, name: str) -> Tensor:
        """A tensor on the CPU."""


class ModelDir(SafetensorsDir):
    """A directory with config.json and safetensors weights, single or sharded; see :class:`SafetensorsDir`.

    Attributes:
        path: the directory. config: config.json.

    Raises:
        InputError: the directory, its config or one of its weight files is missing or unreadable.
    """

    def __init__(self, path: str | Path) -> None:
        self.config: dict[str, Any] = read_config(Path(path))
        try:
            super().__init__(path)
        except TensorFileError as error:
            raise explain(error) or error from error

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """A model by its directory, or by its name on the Hugging Face hub, ORG/NAME[@REVISION], downloaded once.

        Raises:
            InputError: it is neither, or the directory is damaged. TrirunError: the hub cannot be reached.
        """
        return cls(local_model(Path(path)))

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def quant_method(self) -> str | None:
        """``quantization_config.quant_method`` of config.json, or None for an unquantized model."""
        return quant_method(self.config)


def read_config(path: Path) -> dict[str, Any]:
    """The config.json of a model directory.

    Raises:
        InputError: there is no such directory, or it is not one of a model.
    """
    if not path.exists():
        raise InputError(f"{path}: no such directory")
    if not path.is_dir():
        fix = "trirun pack reads GGUF files" if path.suffix == ".gguf" else None
        raise InputError(f"{path} is a file; a model is a directory with config.json and safetensors files", fix)
    if not (path / "config.json").is_file():
        raise InputError(f"{path} is not a model directory: it has no config.json")
    config = read_json(path / "config.json")
    if not isinstance(config.get("model_type"), str | None):
        raise InputError(f"{path / 'config.json'}: model_type is {config['model_type']!r}, not a name")
    return config


def quant_method(config: dict[str, Any]) -> str | None:
    """``quantization_config.quant_method`` of a config.json, or None for an unquantized model."""
    section = config.get("quantization_config")
    if section is None:
        return None
    return str(section.get("quant_method")) if isinstance(section, dict) else "unknown"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        InputError: it is missing, not JSON, or not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise InputError(f"{path} holds {type(value).__name__}, not a JSON object")
    return value
