"""Packed checkpoints in transformers: :func:`load`, and ``from_pretrained`` and ``save_pretrained`` themselves.

transformers has no discovery of third-party methods, so :func:`register` must run first (importing this module runs
it). A process that never does gets an error about mismatched sizes, because the packed tensors are named ``weight``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from transformers.utils.quantization_config import QuantizationConfigMixin
from trirun_kernels.gemm.embedding import Int2Embedding
from trirun_kernels.gemm.linear import Int2Linear
from trirun_kernels.weights.experts import with_linear_layers
from trirun_kernels.weights.names import SCALE, WEIGHT, ZERO

from ..checkpoint.hub import local_model
from ..checkpoint.model_dir import quant_method, read_config
from ..checkpoint.reader import QUANT_METHOD, Checkpoint, Format
from ..errors import InputError
from ..models.pretrained import load_pretrained

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load(path: str | Path, *, device: str | None = None, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """A model as a transformers module in eval mode; the packed layers of a trirun checkpoint are
    :class:`~trirun_kernels.gemm.linear.Int2Linear` modules.

    Args:
        path: a directory, packed or plain, or a name on the Hugging Face hub, ORG/NAME[@REVISION].
        device: "cpu", "cuda", "cuda:N"; None takes the first GPU, or the CPU where there is none.
        dtype: of everything that is not packed; None keeps the stored one, except float32 on the CPU, where half
            precision arithmetic is emulated.

    Raises:
        InputError: there is no such model, it is damaged, or transformers does not know its kind.
        TrirunError: the hub cannot be reached.
    """
    directory = local_model(Path(path))
    if quant_method(read_config(directory)) == QUANT_METHOD:
        # Checks more than transformers does, and says what is wrong.
        Checkpoint(directory)
    return load_pretrained(directory, device or ("cuda" if torch.cuda.is_available() else "cpu"), dtype)


class TrirunConfig(QuantizationConfigMixin):
    """``quantization_config`` as transformers carries it: a :class:`~trirun_cli.checkpoint.reader.Format`."""

    def __init__(self, **section: Any) -> None:
        self.format = Format.from_dict({"quant_method": QUANT_METHOD, **section})
        self.quant_method: Any = QUANT_METHOD

    def to_dict(self) -> dict[str, Any]:
        """The section as config.json holds it."""
        return self.format.to_dict()


class TrirunQuantizer(HfQuantizer):
    """Swaps every packed ``nn.Linear`` of the model on meta for an :class:`Int2Linear` of the same name."""

    requires_calibration = True
    quantization_config: TrirunConfig

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        layout = self.quantization_config.format
        with_linear_layers(model)
        # The head that is one with a packed embedding, and whose name it has there.
        shared = _tied_head(model) if layout.embeddings else {}
        kept = set(layout.modules_to_not_convert) - shared.keys()
        head = getattr(model, "get_output_embeddings", lambda: None)()
        for name, module in list(model.named_modules()):
            stored, dtype = shared.get(name, name), getattr(getattr(module, "weight", None), "dtype", None)
            if isinstance(module, nn.Linear) and name not in kept:
                n, k, bias = module.out_features, module.in_features, module.bias is not None
                _check_size(layout, stored, n, k)
                act_bits = 16 if module is head else layout.activation_bits
                model.set_submodule(name, Int2Linear(k, n, layout.spec(stored), bias, act_bits, dtype, device="meta"))
            elif isinstance(module, nn.Embedding) and name in layout.embeddings:
                n, k = module.num_embeddings, module.embedding_dim
                _check_size(layout, stored, n, k)
                model.set_submodule(name, Int2Embedding(n, k, layout.spec(name), dtype or torch.float32, "meta"))
        _tie_scales(model, shared)
        return model

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        # A tensor in a mapped safetensors file starts at any multiple of 8 bytes; the kernels read whole cache lines.
        for module in model.modules():
            if isinstance(module, (Int2Linear, Int2Embedding)) and module.weight.data_ptr() % 64:
                module.weight.data = module.weight.data.clone()
        return model

    def is_serializable(self) -> bool:
        """``save_pretrained`` works: a module's state is what a checkpoint holds."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Packed weights have no gradient."""
        return False

    @property
    def is_compileable(self) -> bool:
        """The operators have fake implementations for ``torch.compile``."""
        return True

    def _dequantize(self, model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
        for name, module in list(model.named_modules()):
            if isinstance(module, (Int2Linear, Int2Embedding)):
                model.set_submodule(name, module.to_dense(dtype or torch.float32))
        return model


def _check_size(layout: Format, name: str, n: int, k: int) -> None:
    if layout.padded.get(name, [n, k]) != [n, k]:
        raise InputError(f"{name} is packed as {layout.padded[name]}, the model has {[n, k]}")


def _tied_head(model: nn.Module) -> dict[str, str]:
    """The name of the output head of a model that ties it, and that of the embedding; nothing of another model."""
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    ends = ((head.removesuffix(WEIGHT), embedding.removesuffix(WEIGHT)) for head, embedding in tied.items())
    return {h: e for h, e in ends if isinstance(model.get_submodule(e), nn.Embedding)}


def _tie_scales(model: Any, shared: dict[str, str]) -> None:
    """Makes transformers tie what a packed head has beside its words, and load it from one tensor."""
    if not shared:
        return
    ends = [end for end in (SCALE, ZERO) if getattr(model.get_submodule(min(shared)), end[1:], None) is not None]
    more = {head + end: embedding + end for head, embedding in shared.items() for end in ends}
    # On this model, not on its class.
    model._tied_weights_keys = {**model._tied_weights_keys, **more}
    model.all_tied_weights_keys = {**model.all_tied_weights_keys, **more}


def register() -> None:
    """Register the method with transformers, once; later calls do nothing."""
    if QUANT_METHOD not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        register_quantization_config(QUANT_METHOD)(TrirunConfig)
        register_quantizer(QUANT_METHOD)(TrirunQuantizer)


register()
