"""How far the native decoder's logits are from transformers', for every family that it runs.

    python scripts/family_logits.py [FAMILY ...] [--device cpu,cuda]

Of each family a tiny random ternary model, packed; 150 tokens as a prompt of 90, a piece of 50 and ten single tokens,
so that windows of 24 are crossed. A row's difference is ‖logits − transformers'‖ / ‖transformers'‖, against float32
with eager attention. On a CPU cache and head have 32 bits, on a GPU all is float16. "Other choice": rows whose
likeliest token is not transformers', and the most by which it was behind there, in standard deviations of the row.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.small_models import FAMILIES, save_ternary
from trirun_cli.backends.registry import open_runner

VOCAB, PIECES = 65, (90, 50, *(1,) * 10)
SIZES = {"vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 192}
# Its output projection is square.
OWN = {"helium": {"head_dim": 32}}
OPTIONS = {"cpu": {"exact": True}, "cuda": {"dtype": "float16"}}


def native_logits(path: Path, device: str, tokens: list[int]) -> torch.Tensor:
    """Float32 [tokens, vocab] of the native decoder, in :data:`PIECES`."""
    runner = open_runner(path, device=device, slots=1, **OPTIONS[device])
    if not runner.name.startswith("native"):
        raise SystemExit(f"{path}: {runner.name}, {runner.why_slower}")
    admission = runner.cache.admit(tokens[:1], reuse=False)
    found, position = [], 0
    for count in PIECES:
        if not runner.cache.grow(admission.slot, position + count):
            raise SystemExit(f"{path}: the cache has no room for {position + count} tokens")
        found.append(runner.logits(admission.slot, position, tokens[position : position + count], count).cpu())
        position += count
    runner.close()
    return torch.cat(found)


def row(found: torch.Tensor, expected: torch.Tensor) -> str:
    """The largest and the median difference, and rows with another choice."""
    errors = (found - expected).norm(dim=1) / expected.norm(dim=1)
    chosen = found.argmax(1, keepdim=True)
    behind = (expected.amax(1, keepdim=True) - expected.gather(1, chosen)).squeeze(1) / expected.std(1)
    other = behind > 0
    most = f", {behind.max():.1e}" if other.any() else ""
    return f"{errors.max():.1e} | {errors.median():.1e} | {int(other.sum())}{most}"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", nargs="*", help="of tests/small_models.py; all of them if none is named")
    parser.add_argument("--device", default="cpu,cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    devices = options.device.split(",")
    if unknown := [name for name in options.family if name not in FAMILIES]:
        parser.error(f"{', '.join(unknown)}: not one of {', '.join(FAMILIES)}")
    print("| family |" + "".join(f" {device}: largest | median | other choice |" for device in devices))
    print("|---|" + "--:|--:|--:|" * len(devices))
    tokens = torch.randint(3, VOCAB, (sum(PIECES),), generator=torch.Generator().manual_seed(1))
    for name in options.family or FAMILIES:
        family = name.split(",")[0]
        with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
            _, source, packed = save_ternary(family, SIZES | FAMILIES[name] | OWN.get(family, {}), Path(folder))
            reference = AutoModelForCausalLM.from_pretrained(
                source, dtype=torch.float32, attn_implementation="eager"
            ).eval()
            expected = reference(tokens.unsqueeze(0)).logits[0]
            rows = [row(native_logits(packed, device, tokens.tolist()), expected) for device in devices]
        print(f"| {name} | " + " | ".join(rows) + " |", flush=True)


if __name__ == "__main__":
    main()
