"""What lies between `trirun generate` on a CPU and the bound of its kernels, interleaved in one process.

    python scripts/bench_cpu_decode.py CHECKPOINT [--tokens 128] [--rounds 30] [--act-bits 16] [--fifo] [--json]
    python scripts/bench_cpu_decode.py --random DIR       # the 24-layer shape of bench_cpu_peers.py, made in DIR

The bound is the packed products and the head of a step, called back to back on inputs that are quantized already; a
stricter one leaves out the calls too and runs them in one parallel region whose threads never wait. Against them, per
token after the first: one native call for all tokens (`decoder`), and what the command does, text included
(`generate`), greedily and with a temperature, top-k and top-p. Every round takes each once, in changing order; ratios
are taken within a round, their median and quartiles over all rounds. Greedy tokens must be the same from both.

On a machine that others use, --fifo gives this process the cores while it measures (SCHED_FIFO, needs the privilege;
pauses keep it below the share of time that Linux leaves to such processes); otherwise the ratios are as good as the
machine is quiet, and `steal` says how much of the measured time its main thread did not get.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peer_families
import peer_models
from trirun_kernels.arrays import Array

from trirun_cli.backends.cpu.decoder import NativeDecoder
from trirun_cli.backends.cpu.runner import CpuRunner
from trirun_cli.engine.engine import Engine
from trirun_cli.engine.sampling import SamplingParams
from trirun_cli.resources import configs_dir
from trirun_cli.text.completion import Prompt, complete
from trirun_cli.text.detokenizer import quick_tokenizer

BOUND, STRICT, DECODER, GENERATE = "products, called", "products, one region", "decoder", "generate"
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8, "seed": 1},
    "top-k 50": {"temperature": 0.8, "top_k": 50, "seed": 1},
    "top-p 0.95": {"temperature": 0.8, "top_p": 0.95, "seed": 1},
}
PROMPT = "It was a bright morning in spring, and the old clock in the hall had just struck nine when"
PROMPT_TOKENS = 16
# Pauses, in parts of what was measured before: Linux stops SCHED_FIFO for the rest of a second after 95 % of it.
PAUSE = 0.1


class Bench:
    """The contestants on one checkpoint: calls that return seconds per token."""

    def __init__(self, checkpoint: Path, tokens: int, act_bits: int | None, threads: int) -> None:
        context = PROMPT_TOKENS + tokens
        self._decoder = NativeDecoder(checkpoint, act_bits=act_bits, threads=threads, context=context)
        self.name, self.act_bits, self._tokens = self._decoder.name, self._decoder.act_bits, tokens
        self._engine = Engine(CpuRunner(self._decoder))
        has_tokenizer = (checkpoint / "tokenizer.json").is_file()
        # A model made for its shape has no tokenizer; pieces of another's text cost the same.
        self._tokenizer = quick_tokenizer(checkpoint if has_tokenizer else configs_dir() / "demo-model", chat=False)
        self._prompt = tuple(self._tokenizer(PROMPT)["input_ids"][:PROMPT_TOKENS])
        self.texts: dict[str, tuple[int, ...]] = {}

    def wake(self) -> None:
        """Have the library's threads awake, as they are between two tokens."""
        self._decoder.native.products(1, apart=True)

    def contestants(self) -> dict[str, Callable[[], float]]:
        """By name, the bounds first."""
        found: dict[str, Callable[[], float]] = {
            BOUND: lambda: self._products(apart=True),
            STRICT: lambda: self._products(apart=False),
            DECODER: self._greedy,
        }
        for name, options in SAMPLING.items():
            found[f"{GENERATE}, {name}"] = lambda name=name, options=options: self._generate(name, options)
        return found

    def _products(self, *, apart: bool) -> float:
        started = time.perf_counter()
        self._decoder.native.products(self._tokens - 1, apart=apart)
        return (time.perf_counter() - started) / (self._tokens - 1)

    def _greedy(self) -> float:
        """All tokens after the first in one native call."""
        steps, vocab = self._tokens - 1, self._decoder.shape.vocab
        first = int(self._decoder.forward(self._prompt)[0].argmax())
        chosen, logits = np.empty((steps, 1), np.int64), np.empty((1, vocab), np.float32)
        started = time.perf_counter()
        made = self._decoder.native.generate(
            [0], [len(self._prompt)], [first], steps, [], Array.of(chosen), Array.of(logits)
        )
        elapsed = time.perf_counter() - started
        assert made == steps
        self.texts[DECODER] = (first, *chosen[:, 0].tolist())
        return elapsed / steps

    def _generate(self, name: str, options: dict[str, Any]) -> float:
        params = SamplingParams(max_tokens=self._tokens, ignore_stop_ids=True, **options)
        shown = []
        (done,) = complete(
            self._engine,
            self._tokenizer,
            [Prompt("0", self._prompt, params)],
            (),
            on_text=lambda _, text: shown.append(text),
        )
        assert done.usage.generated_tokens == self._tokens
        self.texts.setdefault(name, done.token_ids)
        assert self.texts[name] == done.token_ids, f"{name}: another text from the same seed"
        return 1 / done.usage.decode_tokens_per_s


def measure(bench: Bench, rounds: int) -> tuple[dict[str, list[float]], float]:
    """Seconds per token by contestant and round, and the share of wall time that the main thread was not on a core."""
    contestants = bench.contestants()
    for call in contestants.values():
        call()
    assert bench.texts["greedy"] == bench.texts[DECODER], "generate and the decoder disagree"
    order, seconds = list(contestants), {name: [] for name in contestants}
    wall = own = 0.0
    for _ in range(rounds):
        random.shuffle(order)
        for name in order:
            bench.wake()
            wall_before, own_before = time.perf_counter(), time.thread_time()
            seconds[name].append(contestants[name]())
            elapsed = time.perf_counter() - wall_before
            wall, own = wall + elapsed, own + time.thread_time() - own_before
            time.sleep(PAUSE * elapsed)
    return seconds, max(0.0, 1 - own / wall)


def ratios(seconds: list[float], bound: list[float]) -> list[float]:
    """The quartiles of the ratios of each round."""
    return statistics.quantiles((own / other for own, other in zip(seconds, bound, strict=True)), n=4)


def render(row: dict[str, Any]) -> str:
    """A line per contestant."""
    (low, middle, high), strict = row["to_bound"], row["to_strict"][1]
    return f"{row['name']:24} {row['us_per_token']:9.1f} {middle:8.3f} ({low:.3f}-{high:.3f}) {strict:8.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="packed, Llama-like")
    parser.add_argument("--random", action="store_true", help="make the 24-layer shape there, unless it is there")
    parser.add_argument("--tokens", type=int, default=128, help="of each generation, after a prompt of 16 [128]")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--act-bits", type=int, choices=(8, 16), help="default: the checkpoint's")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--fifo", action="store_true", help="ahead of every other program on this machine")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.random and not arguments.checkpoint.exists():
        peer_models.write_trirun(arguments.checkpoint, peer_families.DEFAULT)
    if arguments.fifo:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    bench = Bench(arguments.checkpoint, arguments.tokens, arguments.act_bits, arguments.threads)
    seconds, steal = measure(bench, arguments.rounds)
    rows = [
        {
            "name": name,
            "us_per_token": statistics.median(values) * 1e6,
            "to_bound": ratios(values, seconds[BOUND]),
            "to_strict": ratios(values, seconds[STRICT]),
        }
        for name, values in seconds.items()
    ]
    if arguments.json:
        print(json.dumps({"engine": bench.name, "act_bits": bench.act_bits, "steal": steal, "rows": rows}))
        return
    print(f"{bench.name}, {bench.act_bits}-bit activations; {arguments.rounds} rounds, steal {steal:.0%}")
    print(f"{'':24} {'µs/token':>9} {'of the bound (quartiles)':>24} {'of the stricter':>15}", file=sys.stdout)
    for row in rows:
        print(render(row))


if __name__ == "__main__":
    main()
