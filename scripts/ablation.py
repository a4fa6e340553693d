"""What each piece of the quantizer is worth on a real model: perplexity, divergence and time with pieces on and off.

    python scripts/ablation.py MODEL --calibration calibration.txt --valid valid.txt --out ablation

writes ablation.json and ablation.md: perplexity, KL divergence, minutes and peak memory (of the GPU, or of the process
on a CPU), over --seeds. Rows can be chosen with --only REGEX. The protocol: windows of 512 tokens spread evenly over
the validation text, float32 logits of the dense model with the dequantized weights.
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
    replace = dataclasses.replace
    signed = replace(fast, grid="signed")
    table: list[tuple[str, Recipe | None]] = [("original", None), ("round to nearest", signed)]
    settings = dict(PLAIN)
    table.append(("plain GPTQ", replace(signed, **settings)))
    for piece in PIECES:
        settings.update(piece)
        table.append(("+ " + ", ".join(f"{key} {value}" for key, value in piece.items()), replace(signed, **settings)))
    table += [("fast", fast), ("default", default), ("best", best)]
    # The rest: other choices of one preset, grids by group sizes first.
    for grid in ("signed", "midrise", "zero", "ternary"):
        for size in (128, 64, 32, -1):
            table.append((f"fast, grid {grid}, group {size}", replace(fast, grid=grid, group_size=size)))
    for grid in ("signed", "midrise", "zero"):
        table.append((f"default, grid {grid}", replace(default, grid=grid)))
    table.append(("default, without end to end", replace(default, e2e_steps=0)))
    table.append(("default, engine gumbel", replace(default, engines=("gumbel",))))
    table.append(("default, end to end, cross entropy 0.3", replace(default, e2e_ce=0.3)))
    table.append(("best, scales alone end to end", replace(best, e2e_code_steps=0)))
    for engine in ("ste", "gumbel"):
        table.append((f"best, engine {engine}", replace(best, engines=(engine,))))
    table.append(("fast, correction 1.0", replace(fast, correction=1.0)))
    table.append(("fast, damp 0.01", replace(fast, damp=0.01)))
    table.append(("fast, 512 samples", replace(fast, samples=512)))
    table.append(("fast, natural length", replace(fast, natural_length=True)))
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

    def quantized(self, recipe: Recipe, sequences: list[Tensor]) -> tuple[torch.nn.Module, Report]:
        """The model quantized as the recipe says, and the report of it."""
        written = Collect()
        report = quantize_model(self.model_dir, recipe, sequences, written, device=self.device)
        return self.dense(report, written), report

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
    parser.add_argument("--seeds", default="0", help="comma-separated; one row each, and their mean and spread")
    parser.add_argument("--only", default="", help="regular expression on the row labels")
    options = parser.parse_args()

    bench = Bench(options.model, options.valid, options.windows, options.device)
    seeds = [int(seed) for seed in options.seeds.split(",")]
    results = []
    for label, recipe in rows():
        if not re.search(options.only, label):
            continue
        for seed in seeds if recipe is not None and label != "round to nearest" else seeds[:1]:
            results.append(measure(bench, label, recipe, seed, options))
            print(
                "{row:40s} seed {seed} {perplexity:9.3f} {kl:8.4f} {seconds:7.1f} s".format(**results[-1]), flush=True
            )
            options.out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
            options.out.with_suffix(".md").write_text(table(results), encoding="utf-8")


def measure(bench: Bench, label: str, recipe: Recipe | None, seed: int, options: argparse.Namespace) -> dict:
    """One row with one seed."""
    started, bits, peak = time.perf_counter(), 16.0, 0
    if recipe is None:
        model = bench.model
    elif label == "round to nearest":
        model, bits = bench.nearest(recipe), 2 + 16 / recipe.group_size
    else:
        recipe = dataclasses.replace(recipe, seed=seed)
        model, report = bench.quantized(recipe, load(options.calibration, bench.tokenizer, recipe))
        bits, peak = report.bits_per_weight, peak_bytes(report)
    seconds = time.perf_counter() - started
    perplexity, divergence = bench.score(model)
    return {
        "row": label,
        "perplexity": perplexity,
        "kl": divergence,
        "bits": bits,
        "seconds": seconds,
        "peak_bytes": peak,
        "device": options.device,
        "seed": seed,
        "recipe": recipe.to_dict() if recipe else None,
    }


def peak_bytes(report: Report) -> int:
    """The most memory a run took: of the GPU where there is one, else of the process."""
    return max(cost.device_bytes for cost in report.stages.values()) or report.peak_bytes


def table(results: list[dict]) -> str:
    """One line per row of the ablation, over its seeds, as Markdown: the mean, and ± half the range."""
    base = next((r["perplexity"] for r in results if r["row"] == "original"), math.nan)
    lines = ["| | perplexity | ratio | KL | bits per weight | minutes | peak MiB | seeds |", "|---" + "|--:" * 7 + "|"]
    for label in dict.fromkeys(r["row"] for r in results):
        runs = [r for r in results if r["row"] == label]
        perplexities = [r["perplexity"] for r in runs]
        mean, spread = sum(perplexities) / len(runs), (max(perplexities) - min(perplexities)) / 2
        shown = f"{mean:.2f} ± {spread:.2f}" if len(runs) > 1 else f"{mean:.2f}"
        divergence = sum(r["kl"] for r in runs) / len(runs)
        minutes, peak = max(r["seconds"] for r in runs) / 60, max(r["peak_bytes"] for r in runs) / 2**20
        lines.append(
            f"| {label} | {shown} | {mean / base:.3f} | {divergence:.3f} | {runs[0]['bits']:.3f} | {minutes:.2f} | "
            f"{peak:.0f} | {len(runs)} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
