"""A Hugging Face model directory for a walk over its blocks: its tensors, and an empty model to fill with them."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import torch
from torch import Tensor, nn
from trirun_kernels.weights.names import WEIGHT
from trirun_kernels.weights.safetensors_dir import SafetensorsDir
from trirun_kernels.weights.safetensors_file import TensorFileError

from ..errors import QuantizationError
from .experts import Cut, stored_as
from .meta import meta_model


class TensorSource(SafetensorsDir):
    """The tensors of a model directory by the names of the model's modules: those of experts may be stored otherwise.

    Raises:
        QuantizationError: see :class:`~trirun_kernels.weights.safetensors_dir.SafetensorsDir`.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            super().__init__(path)
        except TensorFileError as error:
            raise QuantizationError(str(error)) from error

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU in its stored dtype, in the mapped file.

        An expert's layer may lie in the files under another name, or as a slice of a fused tensor: see
        :func:`~trirun_gptq.model.experts.stored_as`.

        Raises:
            QuantizationError: it is not stored. TensorFileError: the file has been cut since it was opened.
        """
        stored, part = self._stored(name)
        return self.tensor(stored) if part is None else part(self.tensor(stored))

    def shape(self, name: str) -> list[int]:
        """The shape of what :meth:`read` returns, by the header of its file alone."""
        stored, part = self._stored(name)
        shape = list(self[stored].shape)
        return shape if part is None else part.shape(shape)

    def _stored(self, name: str) -> tuple[str, Cut | None]:
        """The name a tensor is stored by, and how to cut it from what is stored; None where it is all of that."""
        stored, part = stored_as(name, self)
        if stored is None:
            raise QuantizationError(f"{self.path}: tensor {name} is missing")
        return stored, part


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
        self.model = meta_model(source.path)
        if quantized := getattr(self.model.config, "quantization_config", None):
            raise QuantizationError(f"{source.path} is quantized already: {quantized}")
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
        if name + WEIGHT in self.source and name + WEIGHT not in self._shared.values():
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
        names = {module: name + WEIGHT for name, module in self.model.named_modules()}
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
            raise QuantizationError(f"{self.source.path}: tensor {lost} is missing, and nothing takes {other}")


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
