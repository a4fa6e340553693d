"""Stop trirun at every call that changes a file, and see what is left.

A run of a command is counted once: its writes, renames, fsyncs, and whatever else changes files below the folder of its
output. Then it is run once for each of these calls (or each ``--stride``-th) and killed there by SIGKILL, in the middle
of a write; or the call fails: the disk is full or read-only from there on, or one call has an I/O error. After each of
these runs what has its final name is the old output or the whole new one, the user was told in one line, and the same
command, given again, ends with the bytes of a run that nothing stopped. With ``--errors TWO`` the run waits at the call
while another of the same command runs to its end, which may be a refusal in one line.

    python scripts/crash_points.py pack export quantize --errors KILL,ENOSPC,EROFS,EIO --stride 3

Needs a C compiler, for crash_points.c. Each point is a fork of one process that has torch loaded: a fraction of a
second for pack, a few seconds for quantize.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import gc
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from crash_commands import Command, commands

SOURCE = Path(__file__).with_suffix(".c")
# As crash_arm has them, beside the numbers of errors.
STOPS = {"KILL": 0, "TWO": -1}
LATER = ("ENOSPC", "EROFS")  # a state of the disk, which lasts; the others are of one call


def interposer() -> Path:
    """The library that counts calls, compiled."""
    library = Path(tempfile.mkdtemp(prefix="crash-points-")) / "crash_points.so"
    compiler = [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"]
    subprocess.run(compiler, check=True)
    return library


def tree(place: Path) -> dict[str, str]:
    """SHA-256 of every file at or below a place by its name; {} where nothing is there."""
    files = [place] if place.is_file() else sorted(file for file in place.rglob("*") if file.is_file())
    return {str(file.relative_to(place)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def run(
    command: list[str],
    folder: Path,
    *,
    kind: str = "",
    at: int = 0,
    error: str = "KILL",
    meanwhile: Callable[[], None] | None = None,
) -> tuple[int, str, str]:
    """Run trirun in a fork, stopped at a call.

    Args:
        folder: calls below it count. kind: of calls that count, "" is all. at: the call's number; 0 stops at none.
        error: KILL, the name of an errno, or TWO: it waits at the call until ``meanwhile`` is over.

    Returns:
        (exit code, or the negated signal; what it wrote to stderr; the calls, a line each: kind, tab, path).
    """
    told, traced = (folder.with_name(f"{name}{'' if meanwhile is None else '-first'}") for name in ("stderr", "trace"))
    sys.stdout.flush()
    if (child := os.fork()) == 0:
        code = 70
        try:
            with open(told, "wb") as err, open(traced, "wb") as trace, open(os.devnull, "wb") as null:
                os.dup2(err.fileno(), 2)
                os.dup2(null.fileno(), 1)
                number = STOPS[error] if error in STOPS else getattr(errno, error)
                arm = ctypes.CDLL(None).crash_arm
                arm(os.fsencode(folder), kind.encode(), ctypes.c_long(at), number, error in LATER, trace.fileno())
                code = _main(command)
        finally:
            os._exit(code)
    status = os.waitpid(child, os.WUNTRACED)[1]
    if os.WIFSTOPPED(status):
        if meanwhile is not None:
            meanwhile()
        os.kill(child, signal.SIGCONT)
        status = os.waitpid(child, 0)[1]
    return os.waitstatus_to_exitcode(status), told.read_text(errors="replace"), traced.read_text()


def _main(command: list[str]) -> int:
    from trirun_cli.commands.app import main

    sys.argv = ["trirun", *command]
    try:
        main()
    except SystemExit as stop:
        return int(stop.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def unflushed(trace: str, out: Path, files: list[str]) -> list[str]:
    """Files of an output that were not flushed between their last write and the renaming of the output, and the output
    itself where its directory was not flushed after that."""
    # The name of a whole output that is a file, in its own tree, is ".".
    written, faults, named = {"": 0, **dict.fromkeys(files, 0)}, [], False
    written.pop(".", None)
    flushed = dict.fromkeys(written, -1)
    for number, (call, path) in enumerate(line.split("\t") for line in trace.splitlines()):
        name = path.removeprefix(f"{out}.partial").lstrip("/")
        if path.startswith(f"{out}.partial") and name in written:
            written[name] = number if call == "write" else written[name]
            flushed[name] = number if call == "fsync" else flushed[name]
        elif call.startswith("rename") and path == str(out):
            faults = [f"{out}.partial/{file}" for file in written if flushed[file] < written[file]]
            named = True
        elif call == "fsync" and path == str(out.parent):
            named = False
    return [*faults, str(out)] if named else faults


def points(command: Command, errors: list[str], stride: int) -> tuple[Counter[str], list[str]]:
    """(points tried by error, what went wrong) of one command."""
    folder = command.out.parent
    begin = [] if command.old is None else ["--overwrite"]

    def fresh() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if command.old is not None:
            (shutil.copytree if command.old.is_dir() else shutil.copyfile)(command.old, command.out)

    fresh()
    before = tree(command.out)
    code, told, trace = run(command.arguments + begin, folder)
    if code:
        raise SystemExit(f"{command.name} fails when nothing stops it: {told}")
    whole, left = tree(command.out), {path.name for path in folder.iterdir()}
    faults = [f"not flushed before it was published: {file}" for file in unflushed(trace, command.out, [*whole])]
    tried: Counter[str] = Counter()
    for error in errors:
        for number in range(1, len(trace.splitlines()) + 1, stride):
            fresh()
            where = f"{command.name}, {error} at call {number} ({trace.splitlines()[number - 1]})"
            tried[error] += 1
            if error == "TWO":
                faults += [f"{where}: {fault}" for fault in _two(command, begin, number, before, whole, left)]
                continue
            code, told, _ = run(command.arguments + begin, folder, at=number, error=error)
            found = tree(command.out)
            if found not in (before, whole) and not command.keeps:
                faults.append(f"{where}: the output is neither the old nor the new one: {sorted(found)}")
            if error == "KILL" and code != -signal.SIGKILL:
                faults.append(f"{where}: was not reached (exit code {code})")
            if error != "KILL" and (code not in (0, 1, 3) or (code and told.count("error:") != 1)):
                faults.append(f"{where}: exit code {code}: {told[-300:]}")
            if error != "KILL" and code == 0 and found != whole:
                faults.append(f"{where}: exit code 0 and no whole output")
            again = command.again or (["--overwrite"] if command.out.exists() else [])
            code, told, _ = run(command.arguments + again, folder)
            if code or tree(command.out) != whole:
                faults.append(f"{where}: the next run: exit code {code}, {told[-300:]}")
            if extra := {path.name for path in folder.iterdir()} - left:
                faults.append(f"{where}: left after the next run: {sorted(extra)}")
    return tried, faults


def _two(
    command: Command, begin: list[str], number: int, before: dict[str, str], whole: dict[str, str], left: set[str]
) -> list[str]:
    """What goes wrong where a second run of a command comes, and ends, while the first waits at a call.

    Args:
        begin: options of both. number: of the call. before, whole: the trees of the old and the new output.
        left: names beside the output after a run.
    """
    folder, ended, found = command.out.parent, [], []

    def second() -> None:
        code, told, _ = run(command.arguments + begin, folder)
        ended.append((code, told))
        found.append(tree(command.out))

    first = run(command.arguments + begin, folder, at=number, error="TWO", meanwhile=second)
    faults = []
    for code, told in (first[:2], *ended):
        if code not in (0, 1, 2, 3) or (code and told.count("error:") != 1):
            faults.append(f"exit code {code}: {told[-300:]}")
    if first[0] and all(code for code, _ in ended):
        faults.append("neither run ended well")
    if found[0] not in (before, whole) and not command.keeps:
        faults.append(f"the output is neither the old nor the new one after the second: {sorted(found[0])}")
    if tree(command.out) != whole:
        faults.append(f"no whole output after both: {sorted(tree(command.out))}")
    if extra := {path.name for path in folder.iterdir()} - left:
        faults.append(f"left after both: {sorted(extra)}")
    return faults


def main() -> int:
    """Run the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commands", nargs="+", help="pack, export, gguf, quantize, finetune, prompts")
    parser.add_argument("--errors", default="KILL", help="KILL, TWO, ENOSPC, EROFS, EIO, or others, with commas")
    parser.add_argument("--stride", type=int, default=1, help="stop at every so many calls")
    parser.add_argument("--model", type=Path, help="a ternary model; default: a tiny random one")
    options = parser.parse_args()
    if not hasattr(ctypes.CDLL(None), "crash_arm"):
        os.environ["LD_PRELOAD"] = str(interposer())
        os.execv(sys.executable, [sys.executable, *sys.argv])
    import torch
    import typer

    from trirun_cli.commands.app import app

    for module in ("transformers.models.llama.modeling_llama", "trirun_gptq.pipeline", "trirun_cli.workflows.pack"):
        import_module(module)
    torch.set_num_threads(1)
    # typer would make the commands in each fork, which takes as long as pack's own work; and a collection of garbage
    # would write to, and so copy, all pages that hold objects.
    made = typer.main.get_command(app)
    typer.main.get_command = lambda _: made
    gc.freeze()
    failed = False
    with tempfile.TemporaryDirectory(prefix="crash-points-") as work:
        for command in commands(options.commands, Path(work).resolve() / "work", run, options.model):
            tried, faults = points(command, options.errors.split(","), options.stride)
            counts = ", ".join(f"{count} {error}" for error, count in tried.items())
            print(f"{command.name}: {counts or 'no points'}; {len(faults)} faults", flush=True)
            for fault in faults:
                print(f"  {fault}", flush=True)
            failed |= bool(faults)
    shutil.rmtree(Path(os.environ["LD_PRELOAD"]).parent, ignore_errors=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
