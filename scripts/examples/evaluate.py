"""Perplexity of a checkpoint beside its original's, and how far its predictions are from the original's.

python scripts/examples/evaluate.py CHECKPOINT ORIGINAL
"""

import sys
from pathlib import Path

from trirun_cli.console import Console
from trirun_cli.eval.report import Report
from trirun_cli.eval.session import run
from trirun_cli.eval.settings import Settings


def main() -> None:
    """Evaluate the two directories of the command line on the text that ships with trirun."""
    checkpoint, original = map(Path, sys.argv[1:3])
    settings = Settings(tasks=("perplexity", "kl"), window=128, limit=16)
    report = Report(run(settings, [("model", original), ("checkpoint", checkpoint)], Console(quiet=True)))
    document = report.document()
    for result in document["results"]:
        if result["task"] == "perplexity":
            print(f"{result['role']}: perplexity {result['perplexity']:.2f} ± {result['perplexity_stderr']:.2f}")
    ratio, error = report.ratios["perplexity"]
    print(f"ratio {ratio:.3f} ± {error:.3f}")


if __name__ == "__main__":
    main()
