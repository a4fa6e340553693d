"""Options that several commands share, so that they read and behave the same everywhere."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from inspect import cleandoc
from math import isfinite
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

from ...errors import InputError, UsageError

if TYPE_CHECKING:
    from ...console import Console, ProgressBar

Cell = TypeVar("Cell")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No notes and no progress bars.")]
Device = Annotated[
    str, typer.Option(help="auto (first GPU, else CPU), cpu, cuda or cuda:N.", rich_help_panel="Machine")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the output directory if it is not empty.")]
DType = Annotated[str, typer.Option(help="float32, float16, bfloat16 or auto.", rich_help_panel="Machine")]
ActBits = Annotated[
    int | None, typer.Option(help="Activation bits, 8 or 16. Default: the checkpoint's.", rich_help_panel="Machine")
]
Accumulate = Annotated[
    str,
    typer.Option(
        help="Sums: fp32, or fp16 in long prompts where the GPU gains (trirun doctor); fp16-forced: anyway.",
        rich_help_panel="Machine",
    ),
]
KvCacheDType = Annotated[
    str,
    typer.Option(
        "--kv-cache-dtype",
        help="Keys and values: auto is the type it computes in; int8 takes half the memory, on a GPU.",
        rich_help_panel="Machine",
    ),
]
Engine = Annotated[
    str, typer.Option(help="native, transformers, or auto: native where it runs.", rich_help_panel="Machine")
]

Tf32 = Annotated[
    bool,
    typer.Option("--tf32", help="Let a GPU multiply float32 in TF32, in transformers.", rich_help_panel="Machine"),
]
Compile = Annotated[
    bool,
    typer.Option("--compile", help="torch.compile, where transformers runs the model.", rich_help_panel="Machine"),
]


class _PlainHelp:
    """Help that names an argument in capitals, and an option's type where the option has a value."""

    def get_params(self, ctx: Any) -> list[Any]:
        parameters = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            if isinstance(parameter, TyperArgument):
                parameter.metavar = (parameter.name or "").upper()
            elif getattr(parameter, "is_flag", False):
                parameter.metavar = ""
        return parameters

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]  # type: ignore[misc]


class Command(_PlainHelp, TyperCommand):
    """One command of the command line."""


class Group(_PlainHelp, TyperGroup):
    """A command with commands of its own."""


def help_text(command: Callable[..., None]) -> str:
    """A command's docstring for --help: paragraphs flow to the terminal's width, whatever the source's was."""
    return re.sub(r"(?<=\S)\n(?=\S)", " ", cleandoc(command.__doc__ or ""))


def options_given(context: typer.Context) -> list[str]:
    """The names of the options that a command was given on the command line itself."""
    sources = [(option, context.get_parameter_source(option.name or "")) for option in context.command.params]
    return [option.opts[0] for option, source in sources if source is not None and source.name == "COMMANDLINE"]


def let_threads_sleep() -> None:
    """torch's threads on the CPU sleep while they wait for each other, unless the environment says how they wait. Those
    that spin instead, as they do by themselves, keep the processor from the very thread that they wait for wherever
    other programs run too. OpenMP asks but once, as torch is imported: call it before."""
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["OMP_WAIT_POLICY"] = "passive"


def busy() -> str | None:
    """What says that other programs use this machine's processors now, or None."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    return f"load average {load:.1f} on {cores} cores" if load > max(1.0, 0.75 * cores) else None


def sleep_if_busy() -> str | None:
    """Before a benchmark imports torch: its threads sleep while they wait (:func:`let_threads_sleep`) where other
    programs run too. Returns what :func:`busy` says, for the document and :func:`warn_if_busy`.

    Elsewhere they wait as torch has them do, since that is torch's own speed: a product of 1024 × 1024 with one row
    takes two cores 50 µs with threads that spin and 130 with threads that have to be woken. On two cores that others
    use as well it takes 12 ms with the first and 0.16 with the second, which is no speed of torch's.
    """
    crowd = busy()
    if crowd:
        let_threads_sleep()
    return crowd


def warn_if_busy(console: Console, crowd: str | None, device: str) -> None:
    """Say what :func:`busy` found, where the processors are what is timed."""
    if crowd and device == "cpu":
        console.warn(f"{crowd}: other work takes part in these timings")


def output_dir(given: Path | None, default: str) -> Path:
    """The directory to write: the one given, or a default beside the caller. It has a name, as "." does not."""
    out = Path(default) if given is None else given
    return out if out.name not in ("", "..") else out.resolve()


def check_machine(
    dtype: str,
    act_bits: int | None,
    engine: str = "auto",
    accumulate: str = "fp32",
    kv_cache_dtype: str = "auto",
    context: int | None = None,
) -> None:
    """Refuse values that the machine options do not have.

    Raises:
        UsageError: naming the option.
    """
    if dtype not in ("auto", "float32", "float16", "bfloat16"):
        raise UsageError(f"--dtype {dtype}: auto, float32, float16 or bfloat16")
    if act_bits not in (None, 8, 16):
        raise UsageError(f"--act-bits {act_bits}: 8 or 16")
    if engine not in ("auto", "native", "transformers"):
        raise UsageError(f"--engine {engine}: auto, native or transformers")
    if accumulate not in ("fp32", "fp16", "fp16-forced"):
        raise UsageError(f"--accumulate {accumulate}: fp32, fp16 or fp16-forced")
    if kv_cache_dtype not in ("auto", "int8"):
        raise UsageError(f"--kv-cache-dtype {kv_cache_dtype}: auto or int8")
    if context is not None and context < 1:
        raise UsageError(f"--ctx {context}: at least 1")


def positive_numbers(option: str, text: str) -> list[int]:
    """Comma-separated positive integers, ascending, without repeats.

    Raises:
        UsageError: naming the option and the word that is none, or is too large for any size.
    """
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if not re.fullmatch("0*[1-9][0-9]{0,8}", word):
            raise UsageError(f"{option} {word}: not a positive number")
    return sorted({int(word) for word in words})


def check_measuring(seconds: float, group_size: int = -1) -> None:
    """Refuse values that the options of the benchmarks do not have.

    Raises:
        UsageError: naming the option.
    """
    if not (seconds > 0 and isfinite(seconds)):
        raise UsageError(f"--seconds {seconds:g}: more than 0, and an end")
    if group_size not in (-1, 32, 64, 128):
        raise UsageError(f"--group-size {group_size}: -1, 32, 64 or 128")


def gather(cells: Iterable[Cell], bar: ProgressBar) -> list[Cell]:
    """What a benchmark measures, cell by cell: after Ctrl-C, the cells that were ready.

    Raises:
        KeyboardInterrupt: none was.
    """
    done: list[Cell] = []
    try:
        for cell in cells:
            done.append(cell)
            bar.advance()
    except KeyboardInterrupt:
        if not done:
            raise
    return done


def end_gathering(console: Console, done: int, total: int) -> None:
    """Once everything that is there has been shown: end as Ctrl-C does if it is not all.

    Raises:
        KeyboardInterrupt: done < total.
    """
    if done < total:
        console.warn(f"stopped after {done} of {total} measurements")
        raise KeyboardInterrupt


def check_output(option: str, path: Path | None, *, folder: bool = False) -> None:
    """Refuse a file, or a folder, that results could not be written to, before the work that they are of. Folders
    that are missing are made once there is something to write; this leaves none. Devices and pipes are not tried.

    Raises:
        InputError: naming the option and the reason.
    """
    if path is None or (path.exists() and not path.is_file() and not path.is_dir()):
        return
    place = path if folder else path.parent
    missing = [each for each in (place, *place.parents) if not each.exists()]
    try:
        if not folder and path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        place.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=place).close()
    except OSError as error:
        raise InputError(f"{option} {path}: {error.strerror}") from None
    finally:
        for each in missing:
            with suppress(OSError):
                each.rmdir()


def check_plot(path: Path | None) -> None:
    """Refuse a --plot that could not be drawn, before anything is measured for it.

    Raises:
        UsageError: its name is not one of a picture. InputError: it cannot be written. MissingError: matplotlib is not
            installed.
    """
    if path is None:
        return
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise UsageError(f"--plot {path}: a name that ends in .png, .svg or .pdf")
    check_output("--plot", path)
    from ...bench.plot import require_matplotlib

    require_matplotlib()
