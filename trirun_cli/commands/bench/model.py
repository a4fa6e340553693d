"""``trirun bench model``: how fast a whole model reads prompts and writes text, packed beside dense."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...console import Console, bytes_text
from ...errors import MissingError, OutOfMemoryError, UsageError
from ...workflows.import_cache import as_model_dir
from ..shared.checkpoint_options import CheckpointArgument, CheckpointOption, one_checkpoint
from ..shared.options import ActBits, Device, DType, Json, Quiet, Threads, check_machine, completes
from .measuring import check_measuring, check_plot, end_gathering, gather, measuring_device, positive_numbers

if TYPE_CHECKING:
    from ...bench.models import Cell, Contestant


def _shape_names(incomplete: str) -> list[str]:
    from ...bench.shapes import AS_LLAMA, load_decoder_shapes

    names = [name + end for end in ("", AS_LLAMA) for name in load_decoder_shapes()]
    return [name for name in names if name.startswith(incomplete)]


def command(
    checkpoint: CheckpointArgument = None,
    checkpoint_option: CheckpointOption = None,
    shape: Annotated[
        str | None,
        typer.Option(
            help="Random ternary weights of this shape instead: llama-2-7b, qwen3-30b-a3b, ...; or, with -as-llama "
            "behind it, of a Llama of its size.",
            autocompletion=_shape_names,
        ),
    ] = None,
    batch: Annotated[str, typer.Option(help="Comma-separated numbers of sequences at once.")] = "1,8,32",
    context: Annotated[
        str | None,
        typer.Option(help="Comma-separated tokens that each sequence holds. Default: 1024, or what the model takes."),
    ] = None,
    dense: Annotated[bool, typer.Option("--dense/--no-dense", help="Measure it in 16 bits beside.")] = True,
    group_size: Annotated[
        int | None,
        typer.Option(
            help="With --shape: weights per scale, 32, 64, 128, or -1: a row. Default: -1.",
            autocompletion=completes("32", "64", "128", "-1"),
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(help="Measuring time per contestant and cell.")] = 0.5,
    plot: Annotated[Path | None, typer.Option(help="Write a PNG: tokens per second over the batch.")] = None,
    threads: Threads = None,
    device: Device = "auto",
    dtype: DType = "auto",
    act_bits: ActBits = None,
    kv_cache_dtype: Annotated[
        str,
        typer.Option(
            help="Comma-separated, of auto (as --dtype) and int8: each model with each of them.",
            autocompletion=completes("auto", "int8", "auto,int8"),
            rich_help_panel="Machine",
        ),
    ] = "auto",
    head: Annotated[
        str | None,
        typer.Option(
            help="On a GPU, comma-separated output heads: packed, int8, 16bit. Default: 16bit, or the model's.",
            autocompletion=completes("16bit", "packed,int8,16bit"),
            rich_help_panel="Machine",
        ),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Time prefill and decoding of a whole model, in the engine that serves it.

    First the packed model's logits are compared with the dense one's; a difference ends the run with exit code 6. Then
    both are timed in turns. Prefill is one prompt of the context's length and its first token; decoding adds a token to
    every sequence of the batch. On a GPU a step is a captured graph and times are those of the device; mixtures of
    experts of a --shape run in bfloat16 unless --dtype says otherwise, since their dense selves run in nothing else.

    Examples:

      trirun bench model DIR --batch 1,16 --context 512,4096

      trirun bench model --shape llama-2-7b --batch 1,32 --plot speed.png

      trirun bench model --shape llama-3-8b --batch 32 --kv-cache-dtype auto,int8

      trirun bench model --shape qwen3-8b --batch 1,64 --head packed,int8,16bit
    """
    from ...bench.models import check, document, run
    from ...bench.shapes import decoder_shape_named

    if checkpoint is not None or checkpoint_option is not None:
        checkpoint = one_checkpoint(checkpoint, checkpoint_option)
    if (checkpoint is None) == (shape is None):
        raise UsageError("give a checkpoint directory or --shape, one of them")
    if shape is None and group_size is not None:
        raise UsageError("--group-size belongs to --shape; a checkpoint has its own")
    group_size = -1 if group_size is None else group_size
    batches = positive_numbers("--batch", batch)
    given = None if context is None else positive_numbers("--context", context)
    check_machine(dtype, act_bits, threads=threads)
    check_measuring(seconds, group_size)
    if dtype == "float32":
        raise UsageError(f"--dtype {dtype}: auto, float16 or bfloat16")
    caches = list(dict.fromkeys(kv_cache_dtype.split(",")))
    if not set(caches) <= {"auto", "int8"}:
        raise UsageError(f"--kv-cache-dtype {kv_cache_dtype}: auto, int8, or both with a comma")
    heads = [] if head is None else list(dict.fromkeys(head.split(",")))
    if not set(heads) <= {"packed", "int8", "16bit"}:
        raise UsageError(f"--head {head}: packed, int8, 16bit, or several with commas")
    sizes = None if shape is None else decoder_shape_named(shape)
    check_plot(plot)
    console = Console(as_json=json, quiet=quiet)
    if checkpoint is not None:
        checkpoint = as_model_dir(checkpoint, console)
    contexts = given or [_usual_context(checkpoint)]
    place, load = measuring_device(console, device, threads)
    import torch

    from ...bench.contestants import of_checkpoint, of_shape

    if place.type == "cuda":
        from trirun_kernels.native import library_path

        place = torch.device("cuda", place.index or 0)
        if not library_path("cuda").exists():
            raise MissingError("trirun was built without CUDA", "use --device cpu, or reinstall with nvcc")
    elif "int8" in caches:
        raise UsageError("--kv-cache-dtype int8: only the native decoder of a GPU has it")
    elif heads:
        raise UsageError(f"--head {head}: for a GPU")
    console.note("loading the weights" if shape is None else "making random weights")
    most = max(contexts) + 1
    if sizes is not None:
        contestants = of_shape(
            sizes, device=place, dtype=dtype, group_size=group_size, act_bits=act_bits or 16, positions=most,
            dense=dense, caches=caches, heads=heads, threads=threads, note=console.warn,
        )  # fmt: skip
        vocab, name = sizes.vocab, f"{shape}, random ternary weights, group size {group_size}"
    else:
        assert checkpoint is not None
        contestants, vocab = of_checkpoint(
            checkpoint, device=place, dtype=dtype, act_bits=act_bits, positions=most, dense=dense, caches=caches,
            heads=heads, threads=threads, note=console.warn,
        )  # fmt: skip
        name = str(checkpoint)
    errors = check(contestants, vocab)
    total = len(batches) * len(contexts)
    with console.progress("model", total) as bar:
        cells = gather(run(contestants, batches, contexts, seconds=seconds, progress=bar.describe), bar)
    notes = [note for cell in cells for note in cell.notes]
    if not any(cell.measured for cell in cells):
        raise OutOfMemoryError(notes[0], "measure fewer or shorter sequences: --batch, --context")
    machine = torch.cuda.get_device_name(place) if place.type == "cuda" else "CPU"
    facts = document(contestants, cells, model=name, device=machine, errors=errors)
    console.json("bench.model/1", facts | {"busy": load, "complete": len(cells) == total})
    weights = ", ".join(f"{each.name} {bytes_text(each.weight_bytes)}" for each in contestants)
    title = f"{name}\n{machine}; weights: {weights}\nprefill: one prompt, first token"
    if errors:
        differing = ", ".join(f"{each.name} {errors[each.name]:.2%}" for each in contestants if each.name in errors)
        title += f"; logits differ from {contestants[1].name}: {differing}"
    _table(console, title, contestants, cells)
    for note in notes:
        console.warn(note)
    if plot is not None:
        from ...bench.plot import save_model_plot

        save_model_plot(plot, name, machine, cells)
        console.note(f"wrote {plot}")
    end_gathering(console, len(cells), total)


def _usual_context(checkpoint: Path | None) -> int:
    if checkpoint is None:
        return 1024
    from ...checkpoint.model_dir import read_config
    from ...models.description import longest_context

    # A step adds one token to what a sequence holds.
    return max(min(1024, longest_context(read_config(checkpoint)) - 1), 1)


def _table(console: Console, title: str, contestants: Sequence[Contestant], cells: Sequence[Cell]) -> None:
    columns = ["context", "batch", "weights", "first token ms", "prefill tokens/s", "step ms", "± ms", "tokens/s"]
    columns += ["× prefill", "× decode"] if len(contestants) > 1 else []
    rows = []
    for cell in cells:
        facts = cell.document()
        for index, each in enumerate(contestants):
            speed, row = facts[each.name], [str(cell.context), str(cell.batch), each.name]
            if speed is None:
                rows.append(row + ["—"] * (len(columns) - len(row)))
                continue
            row += [f"{speed['time_to_first_token_ms']:.2f}"]
            row += [f"{speed['prefill_tokens_per_s']:.0f}", f"{speed['inter_token_latency_ms']:.3f}"]
            row += [f"{speed['inter_token_spread_ms']:.3f}", f"{speed['decode_tokens_per_s']:.0f}"]
            if len(contestants) > 1:
                ratios = (speed["prefill_speedup"], speed["decode_speedup"])
                row += ["" if index == 1 else "—" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
            rows.append(row)
    console.table(title, columns, rows)
