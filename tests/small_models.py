"""Small random models of any family that transformers knows, as many tests make them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from trirun_cli.backends.registry import open_runner
from trirun_cli.engine.engine import Engine

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def open_engine(path: Path, *, max_waiting: int | None = None, **options: Any) -> Engine:
    """An engine on a model directory; ``options`` are those of ``open_runner``."""
    return Engine(open_runner(path, **options), max_waiting=max_waiting)


def save_ternary(family: str, change: dict[str, Any], out: Path) -> tuple[Any, Path, Path]:
    """A model whose linear layers, but for the head, are ternary, and whose norms and biases matter.

    Args:
        family: a model type of transformers. change: settings that differ from SIZES.

    Returns:
        the model in float32, its directory ``out/model``, and its packed checkpoint ``out/packed``.
    """
    from trirun_cli.workflows.pack import pack

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(SIZES | change))).eval()
    head = model.get_output_embeddings()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.rand_like(parameter) + (0.5 if "norm" in name else -0.5))
        for module in model.modules():
            if isinstance(module, torch.nn.Linear) and module is not head:
                module.weight.copy_(torch.randint(-1, 2, module.weight.shape) * 2.0**-3)
        model.get_input_embeddings().weight.normal_()
    model.save_pretrained(out / "model")
    report = pack(out / "model", out / "packed")
    assert report.modules and report.exact
    return model, out / "model", out / "packed"
