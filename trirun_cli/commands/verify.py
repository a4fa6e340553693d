"""``trirun verify``: is a checkpoint whole?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..checkpoint.hub import local_model
from ..console import Console
from ..errors import CheckFailed
from .shared.checkpoint_options import CheckpointOption, PackedArgument, one_checkpoint
from .shared.options import Json, Quiet


def command(
    checkpoint: PackedArgument = None,
    checkpoint_option: CheckpointOption = None,
    against: Annotated[
        Path | None,
        typer.Option(
            "--against",
            "--model",
            "-m",
            help="The original, unquantized model: every packed matrix must decode to its weight bit for bit.",
        ),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check a checkpoint: the checksum of every file, shapes against the model, finite scales, a lossless round trip.

    Exit code 6 when a check fails, 3 when the directory cannot be read as a checkpoint at all.

    Example: trirun verify T --against TriLM_1.1B_Unpacked
    """
    console = Console(as_json=json, quiet=quiet)
    checkpoint = local_model(one_checkpoint(checkpoint, checkpoint_option), console)
    from ..checkpoint.formats import open_source
    from ..checkpoint.model_dir import read_config
    from ..checkpoint.reader import Checkpoint
    from ..checkpoint.verify import verify_files, verify_modules
    from ..models.linears import embedding, linear_layers

    read_config(checkpoint)
    original = None if against is None else open_source(local_model(against, console))
    opened = Checkpoint(checkpoint)
    checks = list(verify_files(checkpoint))
    with console.progress("verifying", len(opened.modules)) as bar:
        for check in verify_modules(opened, linear_layers(opened), original, embedding(opened)):
            checks.append(check)
            bar.advance()
    problems = [{"where": where, "problem": problem} for where, problem in checks if problem is not None]
    console.json(
        "verify/1",
        {
            "checkpoint": str(checkpoint),
            "against": None if against is None else str(against),
            "checks": len(checks),
            "ok": not problems,
            "problems": problems,
        },
    )
    if problems:
        if not json:
            console.table("failed checks", ("where", "problem"), [tuple(problem.values()) for problem in problems])
        raise CheckFailed(f"{checkpoint}: {len(problems)} of {len(checks)} checks failed")
    if quiet:
        return
    lossless = "" if against is None else f", every matrix equal to {against} bit for bit"
    console.text(f"{checkpoint}: all {len(checks)} checks passed{lossless}")
