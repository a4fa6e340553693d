"""A Hugging Face model directory as a lazily read set of tensors and an empty model around them."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from trirun_kernels.weights.experts import separate_experts

from ..errors import QuantizationError
from .experts import Cut, stored_as


class TensorSource:
    """The tensors of a directory's safetensors files by name, read when asked for.

    Raises:
        QuantizationError: no safetensors, a missing or damaged shard, one outside of the directory.
    """

    def __init__(self, model_dir: str | Path) -> None:
        self.directory = Path(model_dir)
        self._open: dict[str, Any] = {}
        index = self.directory / "model.safetensors.index.json"
        single = self.directory / "model.safetensors"
        if index.is_file():
            try:
                self._file_of: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                outside = [file for file in self._file_of.values() if Path(file).name != file or file in ("", "..")]
            except (json.JSONDecodeError, KeyError, TypeError, AttributeError):
                raise QuantizationError(f"{index} is not a safetensors index") from None
            if outside:
                raise QuantizationError(f"{index} names {outside[0]!r}, which is no file of its directory")
        elif single.is_file():
            self._file_of = dict.fromkeys(self._handle(single.name).keys(), single.name)
        else:
            raise QuantizationError(f"{self.directory} has neither model.safetensors nor model.safetensors.index.json")

    @property
    def names(self) -> list[str]:
        """All tensor names, in the order of the files."""
        return list(self._file_of)

    @property
    def files(self) -> list[Path]:
        """The files that hold them."""
        return [self.directory / name for name in sorted(set(self._file_of.values()))]

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU in its stored dtype.

        An expert's layer may lie in the files under another name, or as a slice of a fused tensor: see
        :func:`~trirun_gptq.model.experts.stored_as`.
        """
        with self._stored(name) as (handle, stored, part):
            return handle.get_tensor(stored) if part is None else part(handle.get_slice(stored))

    def shape(self, name: str) -> list[int]:
        """The shape of what :meth:`read` returns, by the header of its file alone."""
        with self._stored(name) as (handle, stored, part):
            shape: list[int] = handle.get_slice(stored).get_shape()
            return shape if part is None else part.shape(shape)

    def release(self) -> None:
        """Close the files. Open ones stay mapped, and what was read of them counts as this process's memory."""
        self._open.clear()

    @contextmanager
    def _stored(self, name: str) -> Iterator[tuple[Any, str, Cut | None]]:
        """Where a tensor lies: the open file, its name there, and how to cut it from that; for the time of reading."""
        stored, part = stored_as(name, self._file_of)
        if stored is None:
            raise QuantizationError(f"{self.directory}: tensor {name} is missing")
        from safetensors import SafetensorError

        try:
            yield self._handle(self._file_of[stored]), stored, part
        except SafetensorError as error:
            raise QuantizationError(f"{self.directory / self._file_of[stored]}: {stored}: {error}") from None

    def _handle(self, file: str) -> Any:
        from safetensors import SafetensorError, safe_open

        if file not in self._open:
            try:
                self._open[file] = safe_open(self.directory / file, "pt")
            except (SafetensorError, OSError) as error:
                raise QuantizationError(f"{self.directory / file} cannot be read: {error}") from None
        return self._open[file]


class Skeleton:
    """The model without weights: its class decides what is computed, the source fills in what is needed.

    Attributes:
        model: the causal language model, parameters on the meta device, buffers real.
        blocks_name: path of the list of decoder blocks, for example ``model.layers``.
        blocks: the blocks themselves, in order.

    Raises:
        QuantizationError: the directory has no usable config.json, or the model has no decoder blocks.
    """

    def __init__(self, source: TensorSource) -> None:
        from accelerate import init_empty_weights
        from transformers import AutoConfig, AutoModelForCausalLM

        if not (source.directory / "config.json").is_file():
            raise QuantizationError(f"{source.directory} has no config.json")
        try:
            config = AutoConfig.from_pretrained(source.directory)
        except (ValueError, OSError, KeyError) as error:
            raise QuantizationError(f"{source.directory}/config.json: {_first_line(error)}") from None
        if getattr(config, "quantization_config", None):
            raise QuantizationError(f"{source.directory} is quantized already: {config.quantization_config}")
        try:
            with init_empty_weights(include_buffers=False):
                self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        except (ValueError, ImportError) as error:
            raise QuantizationError(f"{source.directory}: not a causal language model: {_first_line(error)}") from None
        separate_experts(self.model).eval().requires_grad_(False)
        self.source = source
        self.blocks_name, self.blocks = decoder_blocks(self.model)
        self._empty = list(self.blocks)
        self._shared = self._shared_names()
        for name, module in self.blocks.named_modules(prefix=self.blocks_name):
            _require_supported(name, module)

    def block_name(self, index: int) -> str:
        """Path of one block."""
        return f"{self.blocks_name}.{index}"

    def require_tensors(self) -> None:
        """Every parameter is in the files, in the model's shape; a head that shares the embeddings need not be.

        Raises:
            QuantizationError: one is not; it is named.
        """
        head = self.model.get_output_embeddings()
        for name, module in self.model.named_modules():
            for key, parameter in module._parameters.items():
                stored = f"{name}.{key}" if name else key
                if parameter is None or (module is head and stored not in self.source):
                    continue
                found = self.source.shape(self._stored_name(stored))
                if found != list(parameter.shape):
                    shapes = f"{found} in the file, {list(parameter.shape)} by config.json"
                    raise QuantizationError(f"{stored}: {shapes}")
        self.source.release()

    def load_block(self, index: int, device: torch.device) -> nn.Module:
        """A float32 copy of one block with its weights, on ``device``."""
        block = copy.deepcopy(self.blocks[index])
        self._fill(block, self.block_name(index), device)
        self.source.release()
        return block

    def load_rest(self, device: torch.device) -> None:
        """Fill in what runs before the first block (embeddings, rotary tables); the output head stays empty, and is
        looked through for what would spoil the end of a run."""
        head = self.model.get_output_embeddings()
        for name, module in self.model.named_modules():
            if name == self.blocks_name or name.startswith(f"{self.blocks_name}."):
                continue
            if module is head and head is not None:
                for stored in (f"{name}.{key}" for key in module._parameters):
                    if stored in self.source:
                        _require_finite(stored, self.source.read(stored))
            elif module._parameters or module._buffers:
                self._fill(module, name, device, recurse=False)

    def load_head(self, device: torch.device) -> None:
        """Fill in the output head; a tied one shares the embeddings that :meth:`load_rest` filled in."""
        head = self.model.get_output_embeddings()
        if head is None:
            raise QuantizationError(f"{type(self.model).__name__} has no output head")
        name = next(name for name, module in self.model.named_modules() if module is head)
        if f"{name}.weight" in self.source and f"{name}.weight" not in self._shared.values():
            self._fill(head, name, device, recurse=False)
        else:
            head.weight = self.model.get_input_embeddings().weight

    def unload_blocks(self) -> None:
        """Blocks without weights again, as they were before some were filled in."""
        for index, empty in enumerate(self._empty):
            self.blocks[index] = empty

    def _shared_names(self) -> dict[str, str]:
        """The embeddings' name to the head's, where they share one tensor and the files have it under the latter."""
        head, embeddings = self.model.get_output_embeddings(), self.model.get_input_embeddings()
        if head is None or not getattr(self.model.config.get_text_config(), "tie_word_embeddings", False):
            return {}
        names = {module: f"{name}.weight" for name, module in self.model.named_modules()}
        mine, other = names.get(embeddings, ""), names.get(head, "")
        return {mine: other} if mine not in self.source and other in self.source else {}

    def _stored_name(self, name: str) -> str:
        return self._shared.get(name, name)

    def _fill(self, module: nn.Module, prefix: str, device: torch.device, recurse: bool = True) -> None:
        owners = dict(module.named_modules()) if recurse else {"": module}
        for path, owner in owners.items():
            base = ".".join(part for part in (prefix, path) if part)
            for key, parameter in owner._parameters.items():
                if parameter is None:
                    continue
                value = self.source.read(self._stored_name(f"{base}.{key}")).to(device, torch.float32)
                _require_finite(f"{base}.{key}", value)
                owner._parameters[key] = nn.Parameter(value, requires_grad=False)
            for key, buffer in owner._buffers.items():
                if buffer is not None:
                    name = f"{base}.{key}"
                    persistent = key not in owner._non_persistent_buffers_set
                    if persistent and stored_as(name, self.source)[0] is not None:
                        buffer = self.source.read(name)
                    elif persistent and recurse:
                        self._require_no_other_name(name, module, prefix)
                    owner._buffers[key] = buffer.to(device)

    def _require_no_other_name(self, lost: str, module: nn.Module, prefix: str) -> None:
        """Refuse a buffer that no file holds where one holds a tensor that nothing in the module takes: it may be this
        one. Without any, the buffer is what the model makes it."""
        taken = {stored_as(f"{prefix}.{name}", self.source)[0] for name in module.state_dict()}
        others = (name for name in self.source.names if name.startswith(f"{prefix}.") and name not in taken)
        if other := next(others, None):
            raise QuantizationError(f"{self.source.directory}: tensor {lost} is missing, and nothing takes {other}")


def linear_layers(block: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers of a block by their path within it, in definition order; those with a single output, such as
    the gate of a shared expert, are left as they are."""
    layers = {name: module for name, module in block.named_modules() if isinstance(module, nn.Linear)}
    return {name: layer for name, layer in layers.items() if layer.out_features > 1}


def decoder_blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The list of like-built modules that holds the most parameters."""
    best: tuple[int, str, nn.ModuleList] | None = None
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) and len({type(child) for child in module}) == 1:
            size = sum(parameter.numel() for parameter in module.parameters())
            if best is None or size > best[0]:
                best = size, name, module
    if best is None:
        raise QuantizationError(f"{type(model).__name__} has no list of decoder layers")
    return best[1], best[2]


def _require_finite(name: str, value: Tensor) -> None:
    # Of the extremes first: they take no memory beside a matrix that may be the largest there is.
    if value.numel() and not all(map(math.isfinite, map(float, torch.aminmax(value)))):
        bad = int((~torch.isfinite(value)).sum())
        raise QuantizationError(f"{name}: {bad} of {value.numel()} values are NaN or infinite")


def _require_supported(name: str, module: nn.Module) -> None:
    """Refuse what holds weights in the blocks in a form this walk would leave unquantized unnoticed."""
    kind = type(module).__name__
    if kind == "Conv1D":
        raise QuantizationError(f"{name}: Conv1D layers (GPT-2 style, transposed weights) are not supported")
    for key, parameter in module._parameters.items():
        if parameter is not None and parameter.dim() >= 3:
            raise QuantizationError(
                f"{name}.{key} is one {parameter.dim()}-D tensor {list(parameter.shape)} ({kind}): fused "
                "mixture-of-experts weights of this kind, and convolutions, are not supported"
            )
        if parameter is not None and parameter.dim() == 2 and not isinstance(module, nn.Linear | nn.Embedding):
            large = parameter.numel() > 1 << 20
            if large:
                raise QuantizationError(
                    f"{name}.{key} {list(parameter.shape)} belongs to a {kind}, which is not an nn.Linear; "
                    "such layers are not supported"
                )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
