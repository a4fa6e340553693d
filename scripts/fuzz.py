"""Feed changed files to trirun's readers. The only outcomes allowed are a result, and one line of an error that users
get; another exception, more than a second of processor time or more than a gibibyte of memory is a crash.

    python scripts/fuzz.py gguf_header --inputs 1000000 --seed 1
    python scripts/fuzz.py all --seconds 10 --crashes DIR
    python scripts/fuzz.py all --structures 10000      # package hypothesis; every reader of structures, each this many
    python scripts/fuzz.py yaml --guided --seconds 600 --crashes DIR    # inputs by what they reach: package atheris
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import hashlib
import json
import logging
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fuzz_seeds import NoInput
from fuzz_targets import TARGETS, Target

from trirun_cli.errors import explain

CPU_SECONDS, MEMORY_BYTES, LONGEST_LINE = 1.0, 1 << 30, 4096
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 8, 16, 64, 2**31, 2**39, 2**63, 10**400, 0.5, -0.0, 1e308, float("nan"),
    float("inf"), "", "x", "a\nb", "\ud800", "../x", "/dev/zero", "a{99999999999}", [], {}, [[]], [None], {"": None},
    [0, 0], ["x", 1], {"x": {"y": []}},
]  # fmt: skip
NUMBERS = [0, 1, 7, 8, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**60, 2**63, 2**64 - 1]


class TooSlow(BaseException):
    """A read took more than :data:`CPU_SECONDS`. No reader catches it by accident."""


def changed_bytes(raw: bytes, rng: random.Random) -> bytes:
    """The bytes with one to four changes."""
    data = bytearray(raw)
    for _ in range(rng.randint(1, 4)):
        at, kind = rng.randrange(len(data) + 1), rng.randrange(6)
        span = rng.choice((1, 1, 2, 8, 64))
        if kind == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at:at] = rng.randbytes(span)
        elif kind == 2:
            del data[at : at + span]
        elif kind == 3:
            data[at:at] = data[rng.randrange(len(data) + 1) :][:span]
        elif kind == 4:
            width = rng.choice((1, 4, 8))
            data[at : at + width] = (rng.choice(NUMBERS) % 256**width).to_bytes(width, "little")
        elif rng.random() < 0.1:
            data[at:] = b"[" * rng.choice((2, 64, 4000)) if rng.random() < 0.03 else b""
    return bytes(data)


def changed_json(raw: bytes, rng: random.Random, below: int) -> bytes:
    """The JSON with one to three of its values replaced, left out or put elsewhere, all ``below`` so many levels."""
    whole = [json.loads(raw)]
    for _ in range(rng.randint(1, 3)):
        holder, key = _place(whole, rng, below)
        kind = rng.random()
        if kind < 0.7:
            holder[key] = copy.deepcopy(rng.choice(VALUES))
        elif kind < 0.85 and holder is not whole:
            del holder[key]
        else:
            other, there = _place(whole, rng, 0)
            holder[key] = copy.deepcopy(other[there])
    return json.dumps(whole[0]).encode()


def _place(holder: Any, rng: random.Random, level: int) -> tuple[Any, Any]:
    """A value's holder and key: from the top down, so many levels and then further with four chances of five."""
    while True:
        key = rng.choice(list(holder)) if isinstance(holder, dict) else rng.randrange(len(holder))
        value = holder[key]
        if not isinstance(value, dict | list) or not value or (level <= 0 and rng.random() < 0.2):
            return holder, key
        holder, level = value, level - 1


def outcome(target: Target, raw: bytes, folder: Path) -> str | None:
    """What a read ended with: "" a result, None a proper refusal, or what went wrong and where.

    Raises:
        NoInput: there was nothing to read.
    """
    for left in os.scandir(folder):
        shutil.rmtree(left) if left.is_dir(follow_symlinks=False) else os.unlink(left)
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS)
    try:
        target.read(raw, folder)
        return ""
    except (KeyboardInterrupt, NoInput):
        raise
    except BaseException as error:
        known = None if isinstance(error, MemoryError | TooSlow) else explain(error)
        if known is not None:
            text = str(known)
            if text and text.isprintable() and len(text) <= LONGEST_LINE:
                return None
            return f"{type(error).__name__}: its message is no line of at most {LONGEST_LINE} characters"
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/trirun_" in frame.filename]
        last = frames[-1] if frames else traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} in {Path(last.filename).name}:{last.lineno}: {str(error)[:100]}"
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


@contextlib.contextmanager
def bounded() -> Iterator[Path]:
    """A folder in memory, within which :func:`outcome` has bounds of time and memory."""

    # Some readers import it at their first tensor; an import that is broken off cannot be repeated.
    import torch  # noqa: F401

    def late(*_: object) -> None:
        raise TooSlow(f"more than {CPU_SECONDS} s")

    before = signal.signal(signal.SIGVTALRM, late)
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    status = Path("/proc/self/status").read_text()
    used = 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmData")))
    resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY_BYTES, limits[1]))
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    try:
        with tempfile.TemporaryDirectory(dir=memory) as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Readers that unpack into a temporary directory do so in memory too.
            tempfile.tempdir = memory
            # What a server warns of is not looked at.
            logging.disable()
            yield Path(folder)
    finally:
        tempfile.tempdir = None
        logging.disable(logging.NOTSET)
        resource.setrlimit(resource.RLIMIT_DATA, limits)
        signal.signal(signal.SIGVTALRM, before)


def fuzz(
    name: str, inputs: int, seconds: float, seed: int, corpus: Path | None = None, crashes: Path | None = None
) -> dict[str, Any]:
    """Feed one target until so many inputs or seconds are over.

    Args:
        seed: of all changes; the same seed gives the same inputs. corpus: a folder with a folder of further inputs to
            start from by the target's name. crashes: where the smallest input of each crash is written.

    Returns:
        "inputs", "results", "refused", and "crashes": what went wrong, to how often.
    """
    target, rng = TARGETS[name], random.Random(f"{name} {seed}")
    kept = sorted((corpus / name).iterdir()) if corpus is not None and (corpus / name).is_dir() else []
    replayed = [*target.seeds, *(file.read_bytes() for file in kept)]
    found: Counter[str] = Counter()
    smallest: dict[str, bytes] = {}
    results = refused = done = 0
    more = iter(replayed)
    with bounded() as folder:
        # What the reader imports is no part of a read.
        with contextlib.suppress(BaseException):
            target.read(target.seeds[0], folder)
        begin = time.monotonic()
        # Ctrl-C reports what was done until then.
        with contextlib.suppress(KeyboardInterrupt):
            while done < inputs and time.monotonic() - begin < seconds:
                raw = next(more, None)
                if raw is None and rng.random() < target.structured:
                    raw = changed_json(rng.choice(target.seeds), rng, target.below)
                elif raw is None:
                    raw = changed_bytes(rng.choice(replayed), rng)
                try:
                    ended = outcome(target, raw, folder)
                except NoInput:
                    continue
                done += 1
                results, refused = results + (ended == ""), refused + (ended is None)
                if ended:
                    found[ended] += 1
                    if len(raw) < len(smallest.get(ended, raw + b"x")):
                        smallest[ended] = raw
    if crashes is not None:
        for what, raw in smallest.items():
            place = crashes / name
            place.mkdir(parents=True, exist_ok=True)
            (place / hashlib.sha256(what.encode()).hexdigest()[:12]).write_bytes(raw)
    return {"target": name, "inputs": done, "results": results, "refused": refused, "crashes": dict(found)}


def guided(name: str, inputs: int, seconds: float, seed: int, corpus: Path | None, crashes: Path) -> None:
    """Feed one target with what libFuzzer makes of inputs that reached new lines, and end the process: with its code 77
    and the input in ``crashes`` after the first crash."""
    import atheris

    target, kept = TARGETS[name], crashes / f"{name}-corpus"
    kept.mkdir(parents=True, exist_ok=True)
    for number, raw in enumerate(target.seeds):
        (kept / f"seed-{number}").write_bytes(raw)
    places = [str(kept), *([str(corpus / name)] if corpus is not None and (corpus / name).is_dir() else [])]
    with atheris.instrument_imports(include=["trirun_cli", "trirun_gptq", "trirun_kernels"]), bounded() as folder:
        with contextlib.suppress(BaseException):
            target.read(target.seeds[0], folder)

        def one(raw: bytes) -> None:
            with contextlib.suppress(NoInput):
                if ended := outcome(target, raw, folder):
                    raise RuntimeError(ended)

        limits = [f"-max_total_time={int(seconds)}", f"-runs={min(inputs, 2**31 - 1)}", f"-seed={seed + 1}"]
        atheris.Setup([sys.argv[0], *places, *limits, f"-artifact_prefix={crashes}/"], one)
        atheris.Fuzz()


def structured(name: str, examples: int, seed: int) -> dict[str, Any]:
    """As :func:`fuzz`, of structures that hypothesis makes for one of ``fuzz_structures.PROPERTIES``."""
    from fuzz_structures import structures

    report: dict[str, Any] = {"structures": name, "inputs": 0, "crashes": {}}
    with bounded() as folder:
        try:
            report["inputs"] = structures(name, examples, seed, folder, outcome)
        except Exception as error:
            report["crashes"] = {
                f"{type(error).__name__}: {error}"[:500]: "".join(getattr(error, "__notes__", []))[:2000]
            }
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help=f"all, or one of {', '.join(TARGETS)}")
    parser.add_argument("--inputs", type=int, default=1 << 62)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--corpus", type=Path, default=Path(__file__).parent.parent / "tests" / "fuzz" / "corpus")
    parser.add_argument("--crashes", type=Path, help="where the smallest input of each crash is written")
    parser.add_argument("--structures", type=int, metavar="N", help="N of hypothesis' structures for each such reader")
    parser.add_argument("--guided", action="store_true", help="by coverage, with atheris; one target")
    options = parser.parse_args()
    # Tensors here are of a few rows: several threads of torch would only wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.guided:
        given = options.target, options.inputs, options.seconds, options.seed, options.corpus
        guided(*given, options.crashes or Path(tempfile.mkdtemp(prefix="fuzz-")))
    bad = 0
    if options.structures:
        from fuzz_structures import PROPERTIES

        for name in PROPERTIES if options.target == "all" else [options.target]:
            report = structured(name, options.structures, options.seed)
            print(json.dumps(report), flush=True)
            bad += len(report["crashes"])
        return 1 if bad else 0
    for name in TARGETS if options.target == "all" else [options.target]:
        report = fuzz(name, options.inputs, options.seconds, options.seed, options.corpus, options.crashes)
        print(json.dumps(report), flush=True)
        bad += len(report["crashes"])
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
