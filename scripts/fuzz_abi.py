"""Call every function of libtrirun_cpu.so with one to three arguments, or fields of structures, that are wrong: null,
misaligned, negative, beyond all sizes, of no dtype, no numbers. Arrays end where no memory is. What must be refused has
to return an error code; nothing may end the process, and a size that is returned is right or 0.

    python scripts/fuzz_abi.py --calls 100000 --seed 1
    python scripts/fuzz_abi.py --only decoder_step --seconds 60

What the library cannot know is not tried: an array that is shorter than its sizes say.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import random
import struct
import sys
import time
from collections import Counter
from typing import Any

from abi_calls import FUNCTIONS, Call, Maker
from abi_memory import GuardedMemory
from trirun_kernels.native import cpu

HUGE = [2**31 + 1, 2**31 + 128, 2**32, 2**40, 2**48, 2**61, 2**62, 2**63 - 1]
BELOW = [-1, -64, -128, -(2**31), -(2**40), -(2**63)]
ENUMS = [-(2**31), -1, 3, 4, 7, 15, 18, 33, 99, 2**31 - 1]
NUMBERS = [float("nan"), float("inf"), -float("inf"), -1.0, 0.0, 1e-45, 3e38]
CHUNK = 2000  # calls of one child
# Kinds of places, and what is put there. All of them must be refused but for those of MAYBE.
SPOILT: dict[str, list[Any]] = {
    "size": [0, *BELOW, *HUGE],
    "most": [*BELOW, *HUGE],
    "most_steps": [0, *BELOW],
    "negative": BELOW,
    "padded": [1, 63, 65, 127, 129, *BELOW, *HUGE],
    "bytes_read": [*BELOW, 2**48, 2**62, 2**63 - 1],
    "bytes_of": [0, 1, 63],
    "token": [*BELOW, 2**31, 2**63 - 1],
    "threads": [0, -1, -(2**31)],
    "enum": ENUMS,
    "activation": [-1, 4, 8, 99],
    "loose": [*BELOW, *HUGE],
    "group": [-(2**31), -2, 0, 1, 16, 33, 127, 2**31 - 1],
    "pointer": [None, "misaligned"],
    "aligned": [None, "misaligned"],
    "array": [None],
    "struct": [None],
    "bytes": [None],
    "optional": [None, "misaligned"],
    "float": NUMBERS,
    "flag": [2, -1, 2**31 - 1],
    "switch": [2, -1, 2**31 - 1],
}
MAYBE = {"float", "flag", "loose"}
CODES = {0, -1, -2, -3, -4}
SIZES = ("act_bytes", "decoder_cache_bytes", "decoder_workspace", "head_stride", "decoder_context")


def spoil(call: Call, rng: random.Random) -> tuple[bool, list[str]]:
    """Put something wrong in up to three places: (whether the call has to be refused, what was put where)."""
    refused, told, taken = False, [], set()
    for _ in range(rng.choice([0, 1, 1, 1, 2, 3]) if call.places else 0):
        holder, key, kind = rng.choice(call.places)
        if kind == "skip" or (id(holder), key) in taken:
            continue
        taken.add((id(holder), key))
        value = rng.choice(SPOILT[kind])
        old = holder[key] if isinstance(key, int) else getattr(holder, key)
        if value == "misaligned":
            value = (old or 64) - 1
        if isinstance(key, int):
            holder[key] = value
        else:
            setattr(holder, key, value)
        where = f"{type(holder).__name__}.{key}" if isinstance(key, str) else f"{key}"
        told.append(f"{where} ({kind}) = {value if kind not in ('pointer', 'aligned') else value and 'misaligned'}")
        # A number that a field of 32 bits cannot hold is another number; and a missing option is none at all.
        held = holder[key] if isinstance(key, int) else getattr(holder, key)
        unlike = kind not in MAYBE and not (kind == "optional" and value is None)
        refused |= unlike and (held == value or value is None)
    return refused, told


def run(call: Call) -> int:
    """The result of a call; structures and arrays are given by reference."""

    def given(value: Any) -> Any:
        plain = isinstance(value, ctypes.Structure | ctypes._SimpleCData)
        return ctypes.byref(value) if plain else value

    return getattr(cpu(), f"trirun_cpu_{call.name}")(*map(given, call.arguments))


def least(call: Call) -> int:
    """What the size that a call returns is at least, in exact arithmetic."""
    a = call.arguments
    if call.name == "act_bytes":
        return a[0] * (a[2] // 8 * a[1] + (4 if a[2] == 8 else a[1] // 32) + a[1] // 8)
    if call.name in ("head_stride", "decoder_context"):
        return a[0]
    d = a[0]
    if call.name == "decoder_workspace":
        return 4 * a[1] * (2 * d.hidden + max(d.layer[i].ffn for i in range(d.layers)))
    layer = d.layer[a[1]]
    if layer.delta:
        return 0
    return d.slots * layer.kv_heads * layer.context * layer.head_dim * (2 if d.kv_dtype else 4)


def wrong(call: Call, refused: bool, result: int) -> str | None:
    """What is wrong with a call's result."""
    if call.name in SIZES:
        if refused and result:
            return f"{result}, and not 0"
        if result and not least(call) <= result < 2**63:
            return f"{result}, less than {least(call)}"
        return None
    if result not in CODES:
        return f"{result}, which is no code"
    if refused and result == 0:
        return "0, and not refused"
    if call.name == "draw" and result == 0 and not -1 <= call.arguments[3].value < call.arguments[1]:
        return f"token {call.arguments[3].value}"
    return None


def _child(names: list[str], seed: int, first: int, count: int, note: mmap.mmap) -> None:
    maker = Maker(random.Random(), GuardedMemory(random.Random(seed)))
    refusals, faults = 0, []
    for number in range(first, first + count):
        maker.rng.seed(f"{seed} {number}")
        call = maker.call(maker.rng.choice(names))
        refused, told = spoil(call, maker.rng)
        said = f"call {number}, {call.name}: {', '.join(told) or 'right'}"[:4000].encode()
        note[16 : 20 + len(said)] = struct.pack("<I", len(said)) + said
        result = run(call)
        refusals += result != 0
        if fault := wrong(call, refused, result):
            faults.append(f"{said.decode()}: returned {fault}")
        note[:16] = struct.pack("<qq", number + 1 - first, refusals)
    for fault in faults[:20]:
        print(f"FAULT {fault}", flush=True)
    os._exit(1 if faults else 0)


def fuzz(names: list[str], calls: int, seconds: float, seed: int) -> dict[str, Any]:
    """Make calls in children until so many calls or seconds are over.

    Returns:
        "calls", "errors" (calls that returned a code other than 0), "crashes" (what a child did when a signal ended it)
        and "faults" (children that saw a wrong result; they print it).
    """
    begin, done, errors, faults = time.monotonic(), 0, 0, 0
    crashes: Counter[str] = Counter()
    note = mmap.mmap(-1, 8192)
    while done < calls and time.monotonic() - begin < seconds:
        note[:20] = bytes(20)
        count = min(CHUNK, calls - done)
        sys.stdout.flush()
        if (child := os.fork()) == 0:
            try:
                _child(names, seed, done, count, note)
            finally:
                os._exit(70)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        made, refusals = struct.unpack("<qq", note[:16])
        errors += refusals
        if code not in (0, 1):
            length = struct.unpack("<I", note[16:20])[0]
            crashes[f"{note[20 : 20 + length].decode()} ended with {code}"] += 1
            made += 1
        faults += code == 1
        done += made
    return {"calls": done, "errors": errors, "crashes": dict(crashes), "faults": faults}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=FUNCTIONS, action="append", help="a function; repeatable; default: all")
    parser.add_argument("--calls", type=int, default=1 << 62)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    report = fuzz(options.only or list(FUNCTIONS), options.calls, options.seconds, options.seed)
    print(json.dumps(report, indent=1))
    return 1 if report["crashes"] or report["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
