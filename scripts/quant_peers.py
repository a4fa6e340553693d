"""Peer quantizers beside trirun's presets: one model, the same calibration tokens, the same windows of text, one run.

    python scripts/quant_peers.py MODEL --calibration calibration.txt --valid valid.txt --out peers --device cuda

writes peers.json and peers.md: perplexity, its ratio to the original's, KL divergence, bits per weight, seconds and
peak GPU memory. Every row is scored as a dense float32 model with the weights that the method stores. A peer that is
not installed or fails is a row that says so. Rows can be chosen with --only REGEX; --quick cuts every training to two
steps, to see whether the peers run at all.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import math
import re
import time
from collections.abc import Callable

import torch

# quality, which ablation imports first, finds the package in a checkout.
from ablation import PLAIN
from quality import Bench, arguments, peak_bytes, preset, write
from torch import Tensor, nn
from trirun_gptq.calibration import load

SAMPLES, LENGTH, HELD_OUT = 128, 512, 16
# A dense model, bits per weight, and peak GPU bytes where the method resets PyTorch's own count.
Row = Callable[[Bench, list[Tensor], argparse.Namespace], tuple[nn.Module, float, int | None]]


def autoround(iterations: int, **settings: object) -> Row:
    """AutoRound (SignRound), W2 symmetric in groups of 128: an fp16 scale per group."""

    def run(bench: Bench, sequences: list[Tensor], options: argparse.Namespace) -> tuple[nn.Module, float, int | None]:
        from auto_round import AutoRound

        # In float32, as every row is scored; AutoRound computes in mixed precision by itself.
        model = copy.deepcopy(bench.model)
        tuned = AutoRound(
            model,
            bench.tokenizer,
            scheme="W2A16",
            bits=2,
            group_size=128,
            sym=True,
            iters=2 if options.quick else iterations,
            nsamples=len(sequences),
            seqlen=LENGTH,
            batch_size=8,
            dataset=list(torch.stack(sequences).split(8)),
            device_map=options.device,
            seed=options.seed,
            **settings,
        )
        result = tuned.quantize()
        model = result[0] if isinstance(result, tuple) else model
        return model.to(options.device).float(), 2 + 16 / 128, None

    return run


def hqq(group_size: int) -> Row:
    """HQQ, no calibration: an fp16 scale and an fp16 zero per group."""

    def run(bench: Bench, sequences: list[Tensor], options: argparse.Namespace) -> tuple[nn.Module, float, int | None]:
        from hqq.core.quantize import Quantizer

        model = copy.deepcopy(bench.model)
        for name, layer in model.named_modules():
            if isinstance(layer, nn.Linear) and name != "lm_head":
                packed, meta = Quantizer.quantize(
                    layer.weight.data,
                    nbits=2,
                    group_size=group_size,
                    axis=1,
                    optimize=True,
                    device=options.device,
                    compute_dtype=torch.float32,
                )
                layer.weight.data = Quantizer.dequantize(packed, meta).float().view_as(layer.weight)
        return model, 2 + 32 / group_size, None

    return run


def gptqmodel(group_size: int) -> Row:
    """GPTQModel's GPTQ with its own defaults, symmetric."""

    def run(bench: Bench, sequences: list[Tensor], options: argparse.Namespace) -> tuple[nn.Module, float, int | None]:
        from gptqmodel import GPTQModel, QuantizeConfig

        config = QuantizeConfig(bits=2, group_size=group_size, sym=True, format="gptq_v2", offload_to_disk=False)
        loaded = GPTQModel.load(str(bench.model_dir), config)
        loaded.quantize([{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in sequences], batch_size=8)
        model = copy.deepcopy(bench.model)
        for name, layer in loaded.model.named_modules():
            if hasattr(layer, "qweight"):
                dense = layer.dequantize_weight().float().t()
                model.get_submodule(name).weight.data.copy_(dense.to(options.device))
        return model, 2 + 16 / group_size, None

    return run


def trirun(name: str, **settings: object) -> Row:
    """A preset of ours on the peers' 128 sequences, the held-out ones among them."""

    def run(bench: Bench, sequences: list[Tensor], options: argparse.Namespace) -> tuple[nn.Module, float, int | None]:
        held_out = min(HELD_OUT, len(sequences) // 2)
        recipe = dataclasses.replace(
            preset(name),
            samples=len(sequences) - held_out,
            seqlen=LENGTH,
            held_out=held_out,
            seed=options.seed,
            **settings,
        )
        if options.quick:
            recipe = dataclasses.replace(
                recipe,
                refine_steps=min(2, recipe.refine_steps),
                e2e_steps=min(2, recipe.e2e_steps),
                e2e_code_steps=min(2, recipe.e2e_code_steps),
            )
        model, report = bench.quantized(recipe, sequences)
        return model, report.bits_per_weight, peak_bytes(report)

    return run


def original(bench: Bench, sequences: list[Tensor], options: argparse.Namespace) -> tuple[nn.Module, float, int | None]:
    """The model itself."""
    return bench.model, 16.0, None


def nearest(bench: Bench, sequences: list[Tensor], options: argparse.Namespace) -> tuple[nn.Module, float, int | None]:
    """Every weight rounded to the nearest level of a grid that reaches its group's extremes."""
    recipe = dataclasses.replace(preset("fast"), grid="signed")
    return bench.nearest(recipe), 2 + 16 / 128, None


ROWS: dict[str, Row] = {
    "original": original,
    "round to nearest": nearest,
    "HQQ, groups of 64": hqq(64),
    "plain GPTQ": trirun("fast", grid="signed", **PLAIN),
    "GPTQModel": gptqmodel(128),
    "AutoRound, 200 iterations": autoround(200),
    "AutoRound, 200, alg_ext": autoround(200, enable_alg_ext=True),
    "AutoRound, 1000 iterations": autoround(1000),
    "AutoRound, 1000, alg_ext": autoround(1000, enable_alg_ext=True),
    "trirun fast": trirun("fast"),
    "trirun default": trirun("default"),
    "trirun best": trirun("best"),
}


def measure(label: str, row: Row, bench: Bench, sequences: list[Tensor], options: argparse.Namespace) -> dict:
    """One row, or why there is none."""
    gpu = options.device.startswith("cuda")
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    try:
        with torch.random.fork_rng(["cuda"] if gpu else []):
            torch.manual_seed(options.seed)
            model, bits, peak = row(bench, sequences, options)
        seconds = time.perf_counter() - started
        if peak is None:
            peak = torch.cuda.max_memory_allocated() if gpu else 0
        perplexity, divergence = bench.score(model)
    except Exception as error:
        # A peer may fail in any way of its own; the others are measured all the same.
        return {"row": label, "failed": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    return {
        "row": label,
        "perplexity": perplexity,
        "kl": divergence,
        "bits": bits,
        "seconds": seconds,
        "peak_bytes": peak,
    }


def table(results: list[dict]) -> str:
    """The rows as Markdown."""
    base = next((r["perplexity"] for r in results if r["row"] == "original"), math.nan)
    lines = ["| | perplexity | ratio | KL | bits per weight | seconds | peak MiB |", "|---" + "|--:" * 6 + "|"]
    for r in results:
        if "failed" in r:
            lines.append(f"| {r['row']} | {r['failed']} | | | | | |")
            continue
        figures = f"{r['perplexity']:.2f} | {r['perplexity'] / base:.3f} | {r['kl']:.3f} | {r['bits']:.3f}"
        lines.append(f"| {r['row']} | {figures} | {r['seconds']:.0f} | {r['peak_bytes'] / 2**20:.0f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="two steps of every training: do they run?")
    options = parser.parse_args()

    bench = Bench(options.model, options.valid, options.windows, options.device)
    recipe = dataclasses.replace(
        preset("fast"), samples=options.samples, held_out=0, seqlen=LENGTH, correction=0.0,
        seed=options.seed,
    )  # fmt: skip
    sequences = load(options.calibration, bench.tokenizer, recipe)
    results = []
    for label, row in ROWS.items():
        if not re.search(options.only, label):
            continue
        entry = measure(label, row, bench, sequences, options)
        results.append(entry)
        print(json.dumps(entry), flush=True)
        write(options.out, results, table(results))


if __name__ == "__main__":
    main()
