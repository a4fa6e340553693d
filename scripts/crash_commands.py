"""The commands that scripts/crash_points.py stops, and a small model for them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

DEMO = Path(__file__).parent.parent / "configs" / "demo-model"
QUANTIZE = ["--preset", "fast", "--group-size", "64", "--samples", "4", "--seqlen", "64", "--device", "cpu", "--quiet"]
FINETUNE = [
    "--steps", "4", "--batch", "1", "--seqlen", "64", "--group-size", "64", "--held-out", "4", "--evaluations", "2",
    "--device", "cpu", "--quiet",
]  # fmt: skip


@dataclass
class Command:
    """A command to stop.

    Attributes:
        name: for people. arguments: of trirun, without the options that take up or replace what is there.
        out: its output, below the folder that is watched. again: options of the run after the stopped one.
        old: whether an output of another run is there before, which ``again`` replaces.
        keeps: whether a stopped run may leave a part of the answers under the final name.
    """

    name: str
    arguments: list[str]
    out: Path
    again: list[str] = field(default_factory=list)
    old: Path | None = None
    keeps: bool = False


def commands(
    names: list[str], work: Path, run: Callable[..., tuple[int, str, str]], model: Path | None
) -> list[Command]:
    """The commands to stop, each twice: to a new output, and over an old one.

    Args:
        run: of :mod:`crash_points`. model: a small model, made ternary; None makes one.
    """
    work.mkdir(parents=True, exist_ok=True)
    if model is None:
        model = work / "model"
        _ternary(model)

    packed, kept = work / "packed", work / "kept"
    for out, options in ((packed, []), (kept, ["--keep", "down_proj"])):
        code, told, _ = run(["pack", str(model), "--out", str(out), "--quiet", *options], work / "none")
        if code:
            raise SystemExit(told)
    (work / "prompts.txt").write_text("one\ntwo\nthree\n")
    (work / "old.gguf").write_bytes(b"old")
    (work / "old.jsonl").write_text("")
    found = []
    for name in names:
        out = work / name / "out"
        if name == "pack":
            line = ["pack", str(model), "--out", str(out), "--quiet"]
            found += [Command("pack", line, out), Command("pack --overwrite", line, out, old=kept)]
        elif name == "export":
            line = ["export", str(packed), "--to", "dense", "--out", str(out), "--quiet"]
            found += [Command("export", line, out), Command("export --overwrite", line, out, old=kept)]
        elif name == "gguf":
            out = out.with_suffix(".gguf")
            line = ["export", str(packed), "--out", str(out), "--to", "gguf:Q2_0", "--pre", "gpt-2", "--quiet"]
            found += [Command(name, line, out), Command("gguf --overwrite", line, out, old=work / "old.gguf")]
        elif name == "quantize":
            line = ["quantize", str(model), "--out", str(out), *QUANTIZE]
            found += [Command("quantize", line, out)]
        elif name == "finetune":
            line = ["finetune", str(model), "--out", str(out), *FINETUNE]
            found += [Command("finetune", line, out)]
        elif name == "prompts":
            out = out.with_suffix(".jsonl")
            line = ["generate", str(packed), "--prompts-file", str(work / "prompts.txt"), "--out", str(out)]
            line += ["--max-tokens", "4", "--temperature", "0", "--quiet", "--device", "cpu"]
            found += [Command("prompts", line, out, ["--resume"], keeps=True)]
        else:
            raise SystemExit(f"{name}: no such command")
    return found


def _ternary(out: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=8192, num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=True, **sizes
    )
    model = LlamaForCausalLM(config).half()
    for layer in model.model.layers:
        for module in layer.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.data = torch.randint(-1, 2, module.weight.shape).half() * 0.02
    model.save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, out)
