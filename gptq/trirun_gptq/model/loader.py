"""A Hugging Face model directory for a walk over its blocks: its tensors, and an empty model to fill with them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from trirun_kernels.weights.names import WEIGHT
from trirun_kernels.weights.safetensors_dir import SafetensorsDir
from trirun_kernels.weights.safetensors_file import TensorFileError
from trirun_kernels.weights.spec import GROUP_SIZES

from ..errors import QuantizationError
from .meta import meta_model
from .mxfp4 import QUANT_METHOD as MXFP4
from .stored import StoredNames

T = TypeVar("T")
SMALLEST_GROUP = min(size for size in GROUP_SIZES if size > 0)


class TensorSource(SafetensorsDir):
    """The tensors of a model directory by the names of the model's modules: see :class:`~.stored.StoredNames`.

    Raises:
        QuantizationError: see :class:`~trirun_kernels.weights.safetensors_dir.SafetensorsDir`.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            super().__init__(path)
        except TensorFileError as error:
            raise QuantizationError(str(error)) from error

    @cached_property
    def model(self) -> Any:
        """The empty model of the directory; see :func:`~trirun_gptq.model.meta.meta_model`."""
        return meta_model(self.path)

    @cached_property
    def stored(self) -> StoredNames:
        """Where the model's tensors lie in the files."""
        return StoredNames(self.model, self)

    def read(self, name: str) -> Tensor:
        """One tensor of the model, on the CPU in its stored dtype, in the mapped file where it lies there as it is.

        Raises:
            QuantizationError: it is not stored. TensorFileError: the file has been cut since it was opened.
        """
        return self._stored(self.stored.read, name)

    def shape(self, name: str) -> list[int]:
        """The shape of what :meth:`read` returns, by the header of its file alone."""
        return self._stored(self.stored.shape, name)

    def release(self) -> None:
        """See :meth:`SafetensorsDir.release`."""
        super().release()
        if "stored" in self.__dict__:
            self.stored.release()

    def _stored(self, ask: Callable[[str], T], name: str) -> T:
        try:
            return ask(name)
        except KeyError:
            raise QuantizationError(f"{self.path}: tensor {name} is missing") from None


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
        self.model = source.model
        quantized = getattr(self.model.config, "quantization_config", None)
        if quantized and dict(quantized).get("quant_method") != MXFP4:
            raise QuantizationError(f"{source.path} is quantized already: {quantized}")
        self.source = source
        self.blocks_name, self.blocks = decoder_blocks(self.model)
        self._empty = list(self.blocks)
        self._shared = self._shared_names()

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
                if parameter is None or (module is head and stored not in self.source.stored):
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
                    if stored in self.source.stored:
                        _require_finite(stored, self.source.read(stored))
            elif module._parameters or module._buffers:
                self._fill(module, name, device, recurse=False)

    def load_head(self, device: torch.device) -> None:
        """Fill in the output head; a tied one has a bias of its own at most, and shares the embeddings that
        :meth:`load_rest` filled in."""
        head = self.model.get_output_embeddings()
        if head is None:
            raise QuantizationError(f"{type(self.model).__name__} has no output head")
        name = next(name for name, module in self.model.named_modules() if module is head)
        tied = name + WEIGHT not in self.source.stored or name + WEIGHT in self._shared.values()
        if tied:
            head._parameters["weight"] = None
        self._fill(head, name, device, recurse=False)
        if tied:
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
        stored = self.source.stored
        return {mine: other} if mine not in stored and other in stored else {}

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
                    if persistent and name in self.source.stored:
                        buffer = self.source.read(name)
                    elif persistent and recurse and (other := self.source.stored.unknown(prefix)):
                        # It may be this one. Without any such, the buffer is what the model makes it.
                        raise QuantizationError(
                            f"{self.source.path}: tensor {name} is missing, and nothing takes {other}"
                        )
                    owner._buffers[key] = buffer.to(device)


def multiplies(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a module is a linear layer and nothing more: routers and grouped products are classes derived of one."""
    return isinstance(module, nn.Linear) and _is_product(type(module))


def _is_product(kind: type[nn.Linear]) -> bool:
    """Whether a class computes x·Wᵀ + b: one with a forward of its own, as Falcon's, is tried on a small matrix."""
    if kind.forward is nn.Linear.forward:
        return True
    probe = nn.Linear(3, 2, device="meta")
    probe.weight, probe.bias = (nn.Parameter(torch.arange(1.0, 1 + n)) for n in (6, 2))
    probe.weight.data = probe.weight.data.view(2, 3)
    x = torch.tensor([[1.0, -2.0, 4.0], [0.5, 3.0, -1.0]])
    expected = nn.functional.linear(x, probe.weight, probe.bias)
    probe.__class__ = kind
    try:
        found = probe(x)
    except Exception:
        return False  # It needs what a linear layer does not have.
    return isinstance(found, Tensor) and found.shape == expected.shape and torch.allclose(found, expected)


def is_quantizable(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a module is a linear layer that can be two bits wide: with more than one output, unlike the gate of a
    shared expert, and no fewer inputs than the smallest group of one scale."""
    return multiplies(module) and module.out_features > 1 and module.in_features >= SMALLEST_GROUP


def linear_layers(block: nn.Module) -> dict[str, nn.Linear]:
    """The quantizable layers of a block by their path within it, in definition order; see :func:`is_quantizable`. Those
    within a router are none (Gemma 4): which experts a token goes to is decided in 16 bits."""
    modules = dict(block.named_modules())
    routers = tuple(f"{name}." for name, module in modules.items() if type(module).__name__.endswith("Router"))
    return {name: module for name, module in modules.items() if is_quantizable(module) and not name.startswith(routers)}


def kept_modules(block: nn.Module) -> dict[str, str]:
    """What else of a block holds matrices, and stays in 16 bits: paths within it, and what each is, "Conv1d
    [64, 1, 4]": convolutions, experts fused in a way of their own, recurrent parts, small linear layers."""
    quantized = linear_layers(block)
    holders = {name: module for name, module in block.named_modules() if name not in quantized}
    return {name: kind_of(module) for name, module in holders.items() if _largest(module).dim() > 1}


def kind_of(module: nn.Module) -> str:
    """Class of a module and shape of its first parameter of most dimensions, "Conv1d [64, 1, 4]"; "" of one that has no
    parameters of its own."""
    largest = _largest(module)
    return f"{type(module).__name__} {list(largest.shape)}" if largest.dim() else ""


def _largest(module: nn.Module) -> Tensor:
    parameters = [parameter for parameter in module._parameters.values() if parameter is not None]
    return max(parameters, key=Tensor.dim, default=torch.empty(()))


def decoder_blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The list of modules that holds the most parameters; of a model with a text decoder beside others, within that."""
    best: tuple[int, str, nn.ModuleList] | None = None
    decoder = text_decoder(model)
    inside = {id(module) for module in decoder.modules()}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) and id(module) in inside:
            size = sum(parameter.numel() for parameter in module.parameters())
            if best is None or size > best[0]:
                best = size, name, module
    if best is None:
        raise QuantizationError(f"{type(model).__name__} has no list of decoder layers")
    return best[1], best[2]


def text_decoder(model: nn.Module) -> nn.Module:
    """The language model within a model that sees or hears; the model itself where transformers names none."""
    for module in model.modules():
        if isinstance(language := getattr(module, "language_model", None), nn.Module):
            return language
    return model


def _require_finite(name: str, value: Tensor) -> None:
    # Of the extremes first: they take no memory beside a matrix that may be the largest there is.
    if value.numel() and not all(map(math.isfinite, map(float, torch.aminmax(value)))):
        bad = int((~torch.isfinite(value)).sum())
        raise QuantizationError(f"{name}: {bad} of {value.numel()} values are NaN or infinite")
