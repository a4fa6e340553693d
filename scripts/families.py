"""Which families of models trirun quantizes, packs and runs: the real commands on a tiny random model of each.

    python scripts/families.py                      # every causal language model that transformers can build tiny
    python scripts/families.py llama qwen3_moe --markdown families.md

For each family: ``quantize`` (preset fast), ``pack`` of the same model made ternary, ``generate`` from the quantized
checkpoint and what ran it, ``eval``'s perplexity, and how far the checkpoint's logits are from those of the same model
with its packed layers replaced by their dequantized weights. A cell is ``yes`` or the last error.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import resource
import shutil
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tiny_models import tiny_model
from torch import nn
from trirun_gptq.model.meta import linear_modules, meta_model

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "configs" / "demo-model"
COLUMNS = ("quantize", "pack", "generate", "eval")
CELL = 120  # characters of a reason
SECONDS = 120  # of processor time for one family: other work on the machine takes none of them away
STUCK = 20  # times as many seconds on the wall, after which a process is given up that waits for something


@dataclass(slots=True)
class Row:
    """What became of one family. ``cells``: by column, "yes" or why not. ``backend``: what ``generate`` ran on.
    ``packed``: layers in 2 bits, ``linear``: all linear layers of the model. ``difference``: ‖logits − dequantized‖ /
    ‖dequantized‖."""

    family: str
    linear: int = 0
    packed: int = 0
    backend: str = ""
    difference: float = float("nan")
    perplexity: float = float("nan")
    cells: dict[str, str] = field(default_factory=dict)


class Refused(Exception):
    """A command ended with another exit code than 0."""


def command(*arguments: object) -> dict[str, Any]:
    """The JSON document of a trirun command, run in this process."""
    from trirun_cli.commands.app import main

    out, err, kept = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["trirun", *map(str, arguments), "--json"]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as stop:
        if stop.code:
            told = [line for line in err.getvalue().splitlines() if line.startswith(("error:", "internal error:"))]
            raise Refused(told[-1].removeprefix("error: ") if told else f"exit code {stop.code}") from None
    finally:
        sys.argv = kept
    return json.loads(out.getvalue())


def brief(reason: str) -> str:
    """The first line of a reason, at most as wide as a cell of the table."""
    return textwrap.shorten(reason.splitlines()[0], CELL, placeholder=" ...") if reason else "no reason"


def save(model: Any, out: Path) -> Path:
    """The model as a directory, with the demo model's tokenizer."""
    model.save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, out)
    return out


def make_ternary(model: Any) -> None:
    """Every matrix of the blocks to {−s, 0, s}, tensors of fused experts among them."""
    kept = {id(model.get_input_embeddings().weight)}
    if model.get_output_embeddings() is not None:
        kept.add(id(model.get_output_embeddings().weight))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2 and id(parameter) not in kept:
                parameter.copy_(torch.randint(-1, 2, parameter.shape) * 2.0**-4)


def difference(checkpoint: Path) -> tuple[int, float]:
    """Packed layers, and how far logits are from those with dequantized weights in their place."""
    from trirun_kernels import dequantize
    from trirun_kernels.gemm.linear import Int2Linear

    from trirun_cli.integrations.transformers import load

    model = load(checkpoint, device="cpu", dtype=torch.float32)
    tokens = torch.randint(3, 8000, (1, 48), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        got, count = model(tokens, use_cache=False).logits.float(), 0
        for name, module in list(model.named_modules()):
            if isinstance(module, Int2Linear):
                dense = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
                dense.weight.copy_(dequantize(module.packed, torch.float32))
                if module.bias is not None:
                    dense.bias.copy_(module.bias)
                parent, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(parent), leaf, dense)
                count += 1
        want = model(tokens, use_cache=False).logits.float()
    return count, float((got - want).norm() / want.norm())


def attempt(row: Row, folder: Path, text: Path) -> None:
    """Fill in a row. Raises what transformers raises if the family cannot be built."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    model = tiny_model(row.family)
    original = save(model, folder / "original")
    row.linear = len(linear_modules(meta_model(original)))
    make_ternary(model)
    ternary = save(model, folder / "ternary")

    def cell(name: str, action: Any) -> Any:
        try:
            result = action()
        except Refused as refusal:
            row.cells[name] = brief(str(refusal).replace(f"{folder}/", ""))
        except Exception as error:
            row.cells[name] = brief(f"{type(error).__name__}: {error}")
        else:
            row.cells[name] = "yes"
            return result
        return None

    quantized = folder / "quantized"
    sizes = ("--preset", "fast", "--calibration", text, "--samples", 8, "--seqlen", 64, "--group-size", 32)
    cell("quantize", lambda: command("quantize", original, *sizes, "--out", quantized))
    cell("pack", lambda: command("pack", ternary, "--out", folder / "packed"))
    if quantized.exists():
        ask = ("--prompt", "The old house", "-n", 8, "--device", "cpu")
        written = cell("generate", lambda: command("generate", "-c", quantized, *ask))
        row.backend = written["engine"].split(" on ")[0] if written else ""
        scored = cell("eval", lambda: command("eval", "-c", quantized, "--text", text, "--window", 64, "--limit", 4))
        row.perplexity = scored["results"][0]["perplexity"] if scored else row.perplexity
        with contextlib.suppress(Exception):
            row.packed, row.difference = difference(quantized)


def _import_all() -> None:
    """What every family's process needs, imported once before they are forked: half of a family's time."""

    import trirun_cli.commands.app
    import trirun_cli.integrations.transformers
    import trirun_cli.llm
    import trirun_cli.workflows.pack
    import trirun_cli.workflows.quantize  # noqa: F401


def _work(family: str, folder: str, text: str, answer: Any) -> None:
    # The system ends the process at this limit.
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    row = Row(family)
    try:
        attempt(row, Path(folder), Path(text))
    except Exception as error:
        row.cells["quantize"] = brief(f"not tried: {type(error).__name__}: {error}")
    answer.send(row)


def measure(families: Iterable[str], table: Path | None) -> list[Row]:
    """A row for each family, every one in a process of its own: a crash is a row too.

    Args:
        table: where to write the table of what is done so far; None for nowhere.
    """
    rows, context = [], multiprocessing.get_context("fork")
    _import_all()
    with tempfile.TemporaryDirectory() as scratch:
        text = Path(scratch) / "text.txt"
        text.write_text("\n\n".join((DEMO / "valid.txt").read_text().split("\n\n")[:60]))
        for family in families:
            answer, question = context.Pipe(duplex=False)
            folder = Path(scratch) / family
            worker = context.Process(target=_work, args=(family, str(folder), str(text), question))
            worker.start()
            question.close()
            row = Row(family, cells={"quantize": f"no answer in {SECONDS} s of processor time"})
            with contextlib.suppress(EOFError):
                if answer.poll(STUCK * SECONDS):
                    row = answer.recv()
            worker.kill()
            worker.join()
            shutil.rmtree(folder, ignore_errors=True)
            rows.append(row)
            done = " ".join(f"{name}: {row.cells.get(name, '-')[:70]};" for name in COLUMNS)
            print(f"{family}: {done} {row.backend} {row.packed} {row.difference:.1e}", file=sys.stderr, flush=True)
            if table is not None:
                table.write_text(markdown(filter(was_built, rows)))
    return rows


def was_built(row: Row) -> bool:
    """Whether transformers could make the family at all."""
    return not row.cells.get("quantize", "").startswith("not tried")


def markdown(rows: Iterable[Row]) -> str:
    """The table, families as lines."""
    lines = [
        "| family | quantize | pack | generate, CPU | eval | 2-bit layers | logits beside dequantized |",
        "|---|---|---|---|---|--:|--:|",
    ]
    for row in rows:
        ran = f"yes, {row.backend}" if row.cells.get("generate") == "yes" else row.cells.get("generate", "–")
        cells = [row.cells.get("quantize", "–"), row.cells.get("pack", "–"), ran, row.cells.get("eval", "–")]
        plain = [cell.replace("|", "/") for cell in cells]
        lines.append(f"| {row.family} | {' | '.join(plain)} | {row.packed} of {row.linear} | {row.difference:.1e} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """The command. Returns 1 when a family that could be built was not quantized, packed, run or scored."""
    from transformers import logging
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", nargs="*", help="model types of transformers [all]")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there too")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    rows = measure(options.family or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), options.markdown)
    built = list(filter(was_built, rows))
    print(json.dumps([asdict(row) for row in rows], indent=1) if options.json else markdown(built))
    return int(any(row.cells.get(name) != "yes" for row in built for name in COLUMNS))


if __name__ == "__main__":
    sys.exit(main())
