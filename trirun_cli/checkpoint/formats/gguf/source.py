"""A GGUF file in the place of a model directory: what ``trirun pack`` reads."""

from __future__ import annotations

import json
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from trirun_gptq.errors import QuantizationError
from trirun_gptq.layer.quantized import Quantized
from trirun_gptq.lossless.ternary import ternarize
from trirun_kernels.weights.names import EMBEDDING, HEAD, LAYER_LINEARS, WEIGHT
from trirun_kernels.weights.safetensors_file import StoredTensor

from ....errors import InputError
from .architecture import read_architecture
from .blocks import read_codes, read_values
from .file import GgufFile
from .floats import read_floats
from .tokenizer import token_ids, tokenizer_files

# Types of runtimes that run such weights with int8 activations, as their models are trained to be.
_INT8_TYPES = ("I2_S", "IQ1_BN", "IQ2_BN")
_LINEARS = tuple(name + WEIGHT for name in LAYER_LINEARS.values())


class GgufModel:
    """The model of a GGUF file, by transformers' names: a :class:`~trirun_cli.checkpoint.model_dir.ModelSource`.

    Its config.json, tokenizer and generation_config.json are made of the metadata, in a temporary directory that goes
    with the model, at the latest when the program ends.

    Attributes:
        file: the file. config: config.json. path: the directory of the files made. foreign: its packed layers, or None
            where it has none.

    Raises:
        InputError: the file is damaged, or holds a model or a tokenizer that trirun does not read from GGUF.
    """

    quant_method: str | None = None

    def __init__(self, path: str | Path) -> None:
        self.file = GgufFile(path)
        self._model = read_architecture(self.file)
        self.config: dict[str, Any] = self._model.config | token_ids(self.file.metadata)
        files = tokenizer_files(self.file.metadata, self.config)
        self.path = Path(tempfile.mkdtemp(prefix="trirun-gguf-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
        for name, content in (files | {"config.json": self.config}).items():
            text = content if isinstance(content, str) else json.dumps(content, indent=2, ensure_ascii=False)
            (self.path / name).write_text(text, encoding="utf-8")
        packed = any(tensor.type.quantized for tensor in self.file.tensors.values())
        # Of a mixture in floats the experts have trirun's names, which are none of transformers'.
        self.foreign = GgufWeights(self) if packed or self._model.experts else None

    @property
    def names(self) -> list[str]:
        """Every tensor's name, sorted."""
        return sorted(self._model.names)

    @property
    def files(self) -> list[Path]:
        """The file, or its parts."""
        return self.file.paths

    @property
    def activation_bits(self) -> int:
        """8 or 16, what the model is trained to run with."""
        types = {tensor.type.name for tensor in self.file.tensors.values()}
        return 8 if types.intersection(_INT8_TYPES) else self._model.family.activation_bits

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self._model.names

    def __getitem__(self, name: str) -> StoredTensor:
        """Where a tensor lies; its dtype is the name of its type in GGUF.

        Raises:
            InputError: there is none.
        """
        stored, expert = self.file.tensors[self._stored(name)], self._model.experts.get(name)
        start, nbytes, shape = stored.start, stored.nbytes, stored.shape
        if expert is not None:
            nbytes, shape = nbytes // shape[0], shape[1:]
            start += expert * nbytes
        return StoredTensor(self.file.paths[stored.part], start, nbytes, stored.type.name, shape)

    def tensor(self, name: str) -> Tensor:
        """A tensor as floats in memory of its own, its rows in transformers' order; see
        :func:`~trirun_cli.checkpoint.formats.gguf.floats.read_floats`.

        Raises:
            InputError: there is none, or fp16 does not hold its values.
        """
        values = self._model.in_order(name, read_floats(self.file, self._stored(name), self._model.experts.get(name)))
        self.file.release()
        return values

    def codes(self, name: str) -> tuple[Quantized, float]:
        """A quantized tensor as codes and scales, its rows in transformers' order; see
        :func:`~trirun_cli.checkpoint.formats.gguf.blocks.read_codes`."""
        found, error = read_codes(self.file, self._stored(name), self._model.experts.get(name))
        self.file.release()
        rows = torch.from_numpy(self._model.in_order(name, np.arange(found.n)))
        if name in self._model.heads:
            found = Quantized(found.codes[rows], found.scales[rows], None, found.spec)
        return found, error

    def values(self, name: str) -> Tensor:
        """A quantized tensor as float32 with its scales as they are stored, its rows in transformers' order."""
        found = read_values(self.file, self._stored(name), self._model.experts.get(name))
        pieces = [torch.from_numpy(piece) for _, piece in found]
        return self._model.in_order(name, torch.cat(pieces))

    def is_expert(self, name: str) -> bool:
        """Whether a tensor is one expert's matrix."""
        return name in self._model.experts

    def is_quantized(self, name: str) -> bool:
        """Whether a tensor is of a type of at most 2 bits."""
        return self.file.tensors[self._stored(name)].type.quantized

    def _stored(self, name: str) -> str:
        if name not in self._model.names:
            raise InputError(f"{self.file.path}: there is no tensor for {name}")
        return self._model.names[name]


class GgufWeights:
    """The linear layers of a file that has quantized ones, and its embedding and head where they are quantized; see
    :class:`~trirun_cli.checkpoint.formats.ForeignWeights`. Layers that lie there as floats are packed where they are
    ternary, and kept in 16 bits where they are not."""

    def __init__(self, source: GgufModel) -> None:
        self._source = source

    @property
    def activation_bits(self) -> int:
        """8 or 16, what the model is trained to run with."""
        return self._source.activation_bits

    def packed(self, tensor_name: str) -> str | None:
        """The module that a tensor is the packed weight of; None for a tensor that is to stay as floats."""
        module = tensor_name.removesuffix(WEIGHT)
        if tensor_name in (EMBEDDING, HEAD):
            return module if self._source.is_quantized(tensor_name) else None
        if self._source.is_expert(tensor_name):
            # A mixture is packed as a whole, or not at all: read() says which expert is not ternary.
            return module
        return module if tensor_name.endswith(_LINEARS) and self._is_ternary(module) else None

    def read(self, module: str) -> tuple[Quantized, float]:
        """A weight's codes and scales, and the relative error of rounding its scales to fp16: 0 where it is exact.

        Raises:
            InputError: there is no such tensor. QuantizationError: it is damaged, or not ternary.
        """
        if self._source.is_quantized(module + WEIGHT):
            return self._source.codes(module + WEIGHT)
        return ternarize(self._source.tensor(module + WEIGHT), module), 0.0

    def dense(self, module: str) -> Tensor:
        """The weight float32 [n, k], with its scales as they are stored."""
        if self._source.is_quantized(module + WEIGHT):
            return self._source.values(module + WEIGHT)
        return self._source.tensor(module + WEIGHT).float()

    def _is_ternary(self, module: str) -> bool:
        if self._source.is_quantized(module + WEIGHT):
            return True
        try:
            self.read(module)
        except QuantizationError:
            return False
        return True
