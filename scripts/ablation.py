"""What each piece of the quantizer is worth on a real model: perplexity, divergence and time with pieces on and off.

    python scripts/ablation.py MODEL --calibration calibration.txt --valid valid.txt --out ablation

writes ablation.json and ablation.md. Everything is seeded; rows can be chosen with --only REGEX. The protocol: windows
of 512 tokens spread evenly over the validation text, float32 logits of the dense model with the dequantized weights.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import math
import re
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "kernels"), str(ROOT / "gptq")]

from trirun_gptq.calibration import load  # noqa: E402
from trirun_gptq.columns import assign  # noqa: E402
from trirun_gptq.grid import search_grid  # noqa: E402
from trirun_gptq.model import quantize_model  # noqa: E402
from trirun_gptq.observer import Report  # noqa: E402
from trirun_gptq.recipe import Recipe, load_recipe  # noqa: E402
from trirun_kernels import PackedWeight, dequantize  # noqa: E402

PLAIN = {"clip": False, "act_order": False, "sweeps": 0, "refit": False, "sequential": False, "correction": 0.0}
PIECES = [
    {"clip": True},
    {"act_order": True},
    {"sweeps": 2},
    {"refit": True},
    {"sequential": True},
    {"correction": 0.5},
]


def rows() -> list[tuple[str, Recipe | None]]:
    """Every row: a label and its recipe; None is the original model."""
    fast, default, best = (load_recipe(ROOT / "configs" / f"{name}.yaml") for name in ("fast", "default", "best"))
    table: list[tuple[str, Recipe | None]] = [("original", None), ("round to nearest", fast)]
    settings = dict(PLAIN)
    table.append(("plain GPTQ", dataclasses.replace(fast, **settings)))
    for piece in PIECES:
        settings.update(piece)
        label = "+ " + ", ".join(piece) + (" = fast" if piece is PIECES[-1] else "")
        table.append((label, dataclasses.replace(fast, **settings)))
    table.append(("default", default))
    table.append(("best", best))
    for grid in ("zero", "midrise", "ternary"):
        table.append((f"fast, grid {grid}", dataclasses.replace(fast, grid=grid)))
    for size in (64, 32, -1):
        table.append((f"fast, group {size}", dataclasses.replace(fast, group_size=size)))
    table.append(("fast, correction 1.0", dataclasses.replace(fast, correction=1.0)))
    table.append(("fast, damp 0.01", dataclasses.replace(fast, damp=0.01)))
    table.append(("fast, 512 samples", dataclasses.replace(fast, samples=512)))
    table.append(("fast, natural length", dataclasses.replace(fast, natural_length=True)))
    for grid in ("zero", "midrise"):
        table.append((f"default, grid {grid}", dataclasses.replace(default, grid=grid)))
    table.append(("best, grid midrise", dataclasses.replace(best, grid="midrise")))
    table.append(("fast, seed 1", dataclasses.replace(fast, seed=1)))
    return table


class Collect(dict):
    """A writer that keeps the packed tensors in memory; these models are small."""

    def add(self, name: str, tensor: Tensor) -> None:
        self[name] = tensor


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

    def log_probabilities(self, model: torch.nn.Module):
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
        return math.exp(loss / count), divergence / (self.windows.numel())

    def nearest(self, recipe: Recipe) -> torch.nn.Module:
        """The model with every block's linear layers rounded to nearest."""
        model = copy.deepcopy(self.model)
        for name, module in model.named_modules():
            choice = recipe.choice(name)
            if isinstance(module, torch.nn.Linear) and name != "lm_head" and choice is not None:
                weight, spec, levels = module.weight.data, choice[0], 3 if choice[1] else 4
                scales, zeros = search_grid(weight, torch.ones_like(weight[0]), spec, levels=levels, clip=False)
                grouped = weight.view(weight.shape[0], spec.groups(weight.shape[1]), -1)
                step = scales.float().unsqueeze(-1)
                zero = spec.zero if zeros is None else zeros.float().unsqueeze(-1)
                module.weight.data = (step * (assign(grouped, step, zero, levels) - zero)).view_as(weight)
        return model

    def quantized(self, recipe: Recipe, calibration: str) -> tuple[torch.nn.Module, float]:
        """The model quantized as the recipe says, and its stored bits per weight."""
        written = Collect()
        report = quantize_model(
            self.model_dir, recipe, load(calibration, self.tokenizer, recipe), written, device=self.device
        )
        return self.dense(report, written), report.bits_per_weight

    def dense(self, report: Report, written: Collect) -> torch.nn.Module:
        """The model with what a run has written in place of its own weights."""
        model = copy.deepcopy(self.model)
        for module in report.modules:
            parts = (written[f"{module.name}.weight"], written[f"{module.name}.weight_scale"])
            zeros = written.get(f"{module.name}.weight_zero")
            dense = dequantize(PackedWeight(*parts, zeros, module.n, module.k, module.spec))
            model.get_submodule(module.name).weight.data.copy_(dense)
        return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--valid", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="file name without suffix")
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="regular expression on the row labels")
    options = parser.parse_args()

    bench = Bench(options.model, options.valid, options.windows, options.device)
    results = []
    for label, recipe in rows():
        if not re.search(options.only, label):
            continue
        started = time.perf_counter()
        bits = 16.0
        if recipe is None:
            model = bench.model
        elif label == "round to nearest":
            model, bits = bench.nearest(recipe), 2 + 16 / recipe.group_size
        else:
            recipe = dataclasses.replace(recipe, seed=recipe.seed + options.seed)
            model, bits = bench.quantized(recipe, options.calibration)
        seconds = time.perf_counter() - started
        perplexity, divergence = bench.score(model)
        facts = {"bits": bits, "seconds": seconds, "device": options.device, "seed": recipe.seed if recipe else 0}
        entry = {"row": label, "perplexity": perplexity, "kl": divergence, **facts}
        results.append({**entry, "recipe": recipe.to_dict() if recipe else None})
        print(f"{label:32s} {perplexity:9.3f} {divergence:8.4f} {bits:6.3f} {seconds:7.1f} s", flush=True)
        options.out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        lines = ["| | perplexity | KL | bits per weight | seconds |", "|---|--:|--:|--:|--:|"]
        lines += [
            f"| {r['row']} | {r['perplexity']:.2f} | {r['kl']:.3f} | {r['bits']:.3f} | {r['seconds']:.0f} |"
            for r in results
        ]
        options.out.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
