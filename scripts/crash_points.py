"""Stop trirun at every call that changes a file, and see what is left.

A run of a command is counted once: its writes, renames, fsyncs, and whatever else changes files below the folder of its
output. Then it is run once for each of these calls (or each ``--stride``-th) and killed there by SIGKILL, in the middle
of a write; or the call fails: the disk is full or read-only from there on, or one call has an I/O error. After each of
these runs what has its final name is the old output or the whole new one, the user was told in one line, and the same
command, given again, ends with the bytes of a run that nothing stopped.

    python scripts/crash_points.py pack export quantize --errors KILL,ENOSPC,EROFS,EIO --stride 3

Needs a C compiler, for crash_points.c. Each point is a fork of one process that has torch loaded: a fraction of a
second for pack, a few seconds for quantize.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")
DEMO = SOURCE.parent.parent / "configs" / "demo-model"
LATER = ("ENOSPC", "EROFS")  # a state of the disk, which lasts; the others are of one call
QUANTIZE = ["--preset", "fast", "--group-size", "64", "--samples", "4", "--seqlen", "64", "--device", "cpu", "--quiet"]
FINETUNE = [
    "--steps",
    "4",
    "--batch",
    "1",
    "--seqlen",
    "64",
    "--group-size",
    "64",
    "--held-out",
    "4",
    "--evaluations",
    "2",
    "--device",
    "cpu",
    "--quiet",
]


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


def run(command: list[str], folder: Path, *, kind: str = "", at: int = 0, error: str = "KILL") -> tuple[int, str, str]:
    """Run trirun in a fork, stopped at a call.

    Args:
        folder: calls below it count. kind: of calls that count, "" is all. at: the call's number; 0 stops at none.
        error: KILL, or the name of an errno.

    Returns:
        (exit code, or the negated signal; what it wrote to stderr; the calls, a line each: kind, tab, path).
    """
    told, traced = folder.with_name("stderr"), folder.with_name("trace")
    sys.stdout.flush()
    if (child := os.fork()) == 0:
        code = 70
        try:
            with open(told, "wb") as err, open(traced, "wb") as trace, open(os.devnull, "wb") as null:
                os.dup2(err.fileno(), 2)
                os.dup2(null.fileno(), 1)
                number = 0 if error == "KILL" else getattr(errno, error)
                arm = ctypes.CDLL(None).crash_arm
                arm(os.fsencode(folder), kind.encode(), ctypes.c_long(at), number, error in LATER, trace.fileno())
                code = _main(command)
        finally:
            os._exit(code)
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
            code, told, _ = run(command.arguments + begin, folder, at=number, error=error)
            where = f"{command.name}, {error} at call {number} ({trace.splitlines()[number - 1]})"
            tried[error] += 1
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


def commands(names: list[str], work: Path, model: Path | None = None) -> list[Command]:
    """The commands to stop, each twice: to a new output, and over an old one.

    Args:
        model: a small model, made ternary; None makes one.
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


def main() -> int:
    """Run the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commands", nargs="+", help="pack, export, gguf, quantize, finetune, prompts")
    parser.add_argument("--errors", default="KILL", help="KILL, ENOSPC, EROFS, EIO, or others, with commas")
    parser.add_argument("--stride", type=int, default=1, help="stop at every so many calls")
    parser.add_argument("--model", type=Path, help="a ternary model; default: a tiny random one")
    options = parser.parse_args()
    if not hasattr(ctypes.CDLL(None), "crash_arm"):
        os.environ["LD_PRELOAD"] = str(interposer())
        os.execv(sys.executable, [sys.executable, *sys.argv])
    import torch

    for module in ("transformers.models.llama.modeling_llama", "trirun_gptq.pipeline", "trirun_cli.workflows.pack"):
        import_module(module)
    torch.set_num_threads(1)
    failed = False
    with tempfile.TemporaryDirectory(prefix="crash-points-") as work:
        for command in commands(options.commands, Path(work).resolve() / "work", options.model):
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
