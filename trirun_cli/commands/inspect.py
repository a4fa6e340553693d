"""``trirun inspect``: what a checkpoint holds."""

from __future__ import annotations

from ..console import Console, bytes_text
from ..workflows.import_cache import as_model_dir
from .shared.checkpoint_options import CheckpointOption, PackedArgument, one_checkpoint
from .shared.options import Json


def command(
    checkpoint: PackedArgument = None,
    checkpoint_option: CheckpointOption = None,
    json: Json = False,
) -> None:
    """Show the grid, size, code histogram and scale range of every packed matrix, and the totals.

    Example: trirun inspect DIR
    """
    console = Console(as_json=json)
    checkpoint = as_model_dir(one_checkpoint(checkpoint, checkpoint_option), console)
    from ..checkpoint.facts import module_facts, totals
    from ..checkpoint.reader import Checkpoint

    opened = Checkpoint(checkpoint)
    with console.progress("reading", len(opened.modules)) as bar:
        facts = []
        for module in opened.modules:
            facts.append(module_facts(opened, module))
            bar.advance()
    summary = totals(opened, facts)
    console.json("inspect/1", {"checkpoint": str(checkpoint), **summary, "modules": facts})
    console.table(
        f"{checkpoint}: format {opened.format.to_dict()['format_version']}, {opened.format.to_dict()['layout']}",
        ("module", "n × k", "group", "zero", "bits per weight", "% of codes 0 1 2 3", "|scale| min … max"),
        [
            (
                fact["name"],
                f"{fact['n']} × {fact['k']}",
                "row" if fact["group_size"] == -1 else fact["group_size"],
                "stored" if fact["zero"] is None else f"{fact['zero']:g}",
                f"{fact['bits_per_weight']:.3f}",
                " ".join(f"{100 * share:.0f}" for share in fact["code_shares"]),
                f"{fact['scale_min']:.3g} … {fact['scale_max']:.3g}",
            )
            for fact in facts
        ],
    )
    console.text(
        f"{summary['packed_weights'] / 1e6:.1f} M weights in {len(facts)} packed matrices at "
        f"{summary['bits_per_weight']:.3f} bits each ({bytes_text(summary['packed_bytes'])}); "
        f"everything else {bytes_text(summary['other_bytes'])}; activations {opened.format.activation_bits} bits"
    )
