"""How a quantized model compares with its original on text: what the scripts that compare quantizers share.

The protocol: windows of 512 tokens spread evenly over the validation text, float32 logits of the dense model with the
dequantized weights.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "kernels"), str(ROOT / "gptq")]

from trirun_gptq.layer.scale_search import round_to_nearest  # noqa: E402
from trirun_gptq.model.writer import Collected  # noqa: E402
from trirun_gptq.pipeline import quantize_model  # noqa: E402
from trirun_gptq.recipe import Recipe, load_recipe  # noqa: E402
from trirun_gptq.run.report import Report  # noqa: E402
from trirun_gptq.train.start import collected  # noqa: E402


def arguments(description: str) -> argparse.ArgumentParser:
    """What every comparison is told."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("model", type=Path)
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--valid", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="file name without suffix")
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", default="", help="regular expression on the row labels")
    return parser


def preset(name: str) -> Recipe:
    """A recipe of ``configs/``."""
    return load_recipe(ROOT / "configs" / f"{name}.yaml")


def write(out: Path, results: list[dict], table: str) -> None:
    """OUT.json and OUT.md."""
    out.with_suffix(".md").write_text(table, encoding="utf-8")
    # Replaced as a whole: a run that is killed while it writes loses nothing that was measured.
    part = out.with_suffix(".json.part")
    part.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    part.replace(out.with_suffix(".json"))


class Bench:
    """The original model, its log-probabilities on the validation windows, and how a variant compares with them."""

    def __init__(self, model_dir: Path, valid: Path, windows: int, device: str) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.model_dir, self.device = model_dir, device
        self.tokenizer = AutoTokenizer.from_pretrained(model_dir)
        self.model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).to(device)
        ids = torch.tensor(self.tokenizer(valid.read_text(encoding="utf-8"), verbose=False)["input_ids"])
        starts = torch.linspace(0, len(ids) // 512 - 1, windows).long() * 512
        self.windows = torch.stack([ids[start : start + 512] for start in starts.tolist()])
        self.reference = list(self.log_probabilities(self.model))

    def log_probabilities(self, model: torch.nn.Module) -> Iterator[Tensor]:
        """Of every window, float32 [8, 512, vocabulary] at a time."""
        with torch.inference_mode():
            for batch in self.windows.to(self.device).split(8):
                yield model(batch).logits.float().log_softmax(-1)

    def score(self, model: torch.nn.Module) -> tuple[float, float]:
        """Perplexity, and the mean divergence KL(original ‖ model) per token in nats."""
        loss = divergence = count = 0.0
        batches = self.windows.to(self.device).split(8)
        for batch, mine, original in zip(batches, self.log_probabilities(model), self.reference, strict=True):
            loss += F.nll_loss(mine[:, :-1].flatten(0, 1), batch[:, 1:].flatten(), reduction="sum").item()
            divergence += F.kl_div(mine, original, reduction="sum", log_target=True).item()
            count += batch[:, 1:].numel()
        return math.exp(loss / count), divergence / self.windows.numel()

    def nearest(self, recipe: Recipe) -> torch.nn.Module:
        """The model with every block's linear layers rounded to nearest."""
        model = copy.deepcopy(self.model)
        for name, module in model.named_modules():
            grid = recipe.choice(name)
            if isinstance(module, torch.nn.Linear) and name != "lm_head" and grid is not None:
                rounded = round_to_nearest(module.weight.data, grid.spec, levels=grid.levels, clip=False)
                module.weight.data = rounded.dequantize()
        return model

    def quantized(self, recipe: Recipe, sequences: list[Tensor]) -> tuple[torch.nn.Module, Report]:
        """The model quantized as the recipe says, and the report of it."""
        written = Collected()
        report = quantize_model(self.model_dir, recipe, sequences, written, device=self.device)
        model = copy.deepcopy(self.model)
        shapes = ((module.name, module.n, module.k, module.spec) for module in report.modules)
        for name, weight in collected(written, shapes).items():
            model.get_submodule(name).weight.data.copy_(weight.dequantize())
        return model, report


def peak_bytes(report: Report) -> int:
    """The most memory a run took: of the GPU where there is one, else of the process."""
    return max(cost.device_bytes for cost in report.stages.values()) or report.peak_bytes
