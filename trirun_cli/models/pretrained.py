"""transformers models of a directory that holds all of their weights: what is not stored is not made up."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoint.model_dir import quant_method, read_config
from ..errors import InputError, as_input_error

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_pretrained(path: str | Path, device: str = "cpu", dtype: Any = None) -> PreTrainedModel:
    """The causal language model of a directory, in eval mode.

    Args:
        device: where to put it. dtype: None keeps the stored one, except on the CPU, where half precision arithmetic is
            emulated: float32.

    Raises:
        InputError: transformers cannot load it, or would fill a tensor that is missing, or has another shape than
            config.json says, with random numbers.
    """
    import torch
    from transformers import AutoConfig
    from transformers.utils.quantization_config import Mxfp4Config
    from trirun_gptq.model.meta import auto_class
    from trirun_gptq.model.mxfp4 import QUANT_METHOD as MXFP4
    from trirun_gptq.run.quiet_hub import quiet_transformers

    options: dict[str, Any] = {
        "dtype": dtype or (torch.float32 if torch.device(device).type == "cpu" else "auto"),
        "device_map": device,
        "ignore_mismatched_sizes": True,
        "output_loading_info": True,
    }
    with as_input_error(path), quiet_transformers():
        if quant_method(read_config(Path(path))) == MXFP4:
            options["quantization_config"] = Mxfp4Config(dequantize=True)
        try:
            loaded: Any = auto_class(AutoConfig.from_pretrained(path)).from_pretrained(path, **options)
        except RuntimeError as error:
            # Its details are in the table.
            if "CONVERSION" not in str(error):
                raise
            reason = "tensors that belong together, as those of experts, differ in number or shape"
            raise InputError(f"{path}: {reason}") from error
    model, found = loaded
    if missing := sorted(found["missing_keys"]):
        raise InputError(f"{path} holds no {_first(missing)}")
    if mismatched := sorted(found["mismatched_keys"]):
        name, stored, expected = mismatched[0]
        raise InputError(f"{path}: {name} has shape {list(stored)}, config.json says {list(expected)}")
    return model.eval()


def _first(names: list[str]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more tensors" if len(names) > 2 else "")
