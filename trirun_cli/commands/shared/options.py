"""Options that several commands share, so that they read and behave the same everywhere."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from contextlib import suppress
from inspect import cleandoc
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

from ...errors import InputError, UsageError
from ...processors import processors


def completes(*names: str) -> Callable[[str], list[str]]:
    """For ``typer.Option(autocompletion=...)``: what TAB offers of these names after what has been typed."""

    def offered(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    return offered


DTYPES = ("auto", "float32", "float16", "bfloat16")
ENGINES = ("auto", "native", "transformers")
ACCUMULATE = ("fp32", "fp16", "fp16-forced")
KV_CACHE_DTYPES = ("auto", "int8")
HEADS = ("auto", "16bit", "int8")
ACT_BITS = (8, 16)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No notes and no progress bars.")]
Device = Annotated[
    str,
    typer.Option(
        help="auto (first GPU, else CPU), cpu, cuda or cuda:N.",
        rich_help_panel="Machine",
        autocompletion=completes("auto", "cpu", "cuda"),
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        help="Threads on the CPU. Default: OMP_NUM_THREADS, or one per processor that it may use.",
        rich_help_panel="Machine",
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the output directory if it is not empty.")]
DType = Annotated[
    str,
    typer.Option(
        help="float32, float16, bfloat16 or auto.", rich_help_panel="Machine", autocompletion=completes(*DTYPES)
    ),
]
ActBits = Annotated[
    int | None,
    typer.Option(
        help="Activation bits, 8 or 16. Default: the checkpoint's.",
        rich_help_panel="Machine",
        autocompletion=completes(*map(str, ACT_BITS)),
    ),
]
Accumulate = Annotated[
    str,
    typer.Option(
        help="Sums: fp32, or fp16 in long prompts where the GPU gains (trirun doctor); fp16-forced: anyway.",
        rich_help_panel="Machine",
        autocompletion=completes(*ACCUMULATE),
    ),
]
KvCacheDType = Annotated[
    str,
    typer.Option(
        "--kv-cache-dtype",
        help="Keys and values: auto is the type it computes in; int8 takes half the memory, on a GPU.",
        rich_help_panel="Machine",
        autocompletion=completes(*KV_CACHE_DTYPES),
    ),
]
Head = Annotated[
    str,
    typer.Option(
        help="Output head that is not packed: 16bit, int8 with a scale per row, or auto: int8 on a CPU alone.",
        rich_help_panel="Machine",
        autocompletion=completes(*HEADS),
    ),
]
Engine = Annotated[
    str,
    typer.Option(
        help="native, transformers, or auto: native where it runs.",
        rich_help_panel="Machine",
        autocompletion=completes(*ENGINES),
    ),
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
    threads: int | None = None,
    head: str = "auto",
) -> None:
    """Refuse values that the machine options do not have.

    Raises:
        UsageError: naming the option.
    """
    if dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype}: auto, float32, float16 or bfloat16")
    if act_bits not in (None, *ACT_BITS):
        raise UsageError(f"--act-bits {act_bits}: 8 or 16")
    if engine not in ENGINES:
        raise UsageError(f"--engine {engine}: auto, native or transformers")
    if accumulate not in ACCUMULATE:
        raise UsageError(f"--accumulate {accumulate}: fp32, fp16 or fp16-forced")
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        raise UsageError(f"--kv-cache-dtype {kv_cache_dtype}: auto or int8")
    if head not in HEADS:
        raise UsageError(f"--head {head}: auto, 16bit or int8")
    if context is not None and context < 1:
        raise UsageError(f"--ctx {context}: at least 1")
    check_threads(threads)


def check_threads(threads: int | None) -> None:
    """Refuse a number of threads that this process cannot run at once.

    Raises:
        UsageError: naming the option.
    """
    if threads is None:
        return
    if threads < 1:
        raise UsageError(f"--threads {threads}: at least 1")
    if threads > processors():
        raise UsageError(f"--threads {threads}: this process may use {processors()} processors")


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
