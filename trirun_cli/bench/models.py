"""``trirun bench model``: whole models, packed beside dense, checked first and timed in turns."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from ..console import bytes_text
from ..errors import CheckFailed, OutOfMemoryError, explain

# Allowed relative difference of logits, packed against dense: both compute in 16 bits, and every layer rounds.
ALLOWED_ERROR = 0.05
CHECK_PROMPTS, CHECK_TOKENS = 3, 64
TURNS = 3  # of each contestant in a cell


@dataclass(frozen=True, slots=True)
class Speed:
    """One contestant in one cell.

    Attributes:
        prefill_s: of one prompt as long as the context, the first token sampled: the time to the first token.
        step_s: median of a step that adds a token to every sequence of the batch: the time between tokens.
        spread_s: distance between the quartiles of that.
    """

    prefill_s: float
    step_s: float
    spread_s: float

    def document(self, batch: int, context: int) -> dict[str, float]:
        """Times in milliseconds, and the rates that follow from them."""
        return {
            "prefill_tokens_per_s": context / self.prefill_s,
            "time_to_first_token_ms": self.prefill_s * 1e3,
            "decode_tokens_per_s": batch / self.step_s,
            "inter_token_latency_ms": self.step_s * 1e3,
            "inter_token_spread_ms": self.spread_s * 1e3,
        }


@dataclass(frozen=True, slots=True)
class Cell:
    """``batch`` sequences of ``context`` tokens each, and each contestant's speed on them: None where it does not fit
    into the memory, and in ``missing`` why."""

    batch: int
    context: int
    speeds: dict[str, Speed | None] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def measured(self) -> bool:
        """Whether some contestant was."""
        return any(speed is not None for speed in self.speeds.values())

    @property
    def notes(self) -> list[str]:
        """A line for each contestant that was not measured."""
        return [f"batch {self.batch}, context {self.context}: {name} {why}" for name, why in self.missing.items()]

    def document(self) -> dict:
        """The cell for --json, with every contestant's speed-up over the second; the first's are also at the top."""
        out: dict = {"batch": self.batch, "context": self.context}
        for name, speed in self.speeds.items():
            out[name] = None if speed is None else speed.document(self.batch, self.context)
        if len(self.speeds) > 1:
            _, theirs, *_ = self.speeds.values()
            for name, speed in self.speeds.items():
                if speed is not None:
                    out[name]["decode_speedup"] = None if theirs is None else theirs.step_s / speed.step_s
                    out[name]["prefill_speedup"] = None if theirs is None else theirs.prefill_s / speed.prefill_s
            ours = out[next(iter(self.speeds))] or {}
            out |= {name: ours.get(name) for name in ("decode_speedup", "prefill_speedup")}
        return out | ({"missing": self.missing} if self.missing else {})


class Contestant(Protocol):
    """A model that can be timed.

    Attributes:
        name: for people and for --json. weight_bytes: of all its weights where it computes.
        settle_s: seconds that it runs at each of its turns before it is timed.
    """

    name: str
    weight_bytes: int
    settle_s: float

    def logits(self, tokens: Sequence[int]) -> list[float]:
        """After the last of these tokens, [vocab]; of a mixture's first layers, one of each kind. In the rest of many
        random layers some token's experts are nearly equal, and rounding decides between them."""

    def room(self, batch: int, context: int) -> tuple[int, int]:
        """Bytes that :meth:`open` will take for a cache, and those that are free now."""

    def open(self, batch: int, context: int) -> tuple[Callable[[], float], Callable[[], float]]:
        """Two functions that run, and return the seconds of, the prefill of one sequence and a step of the whole batch.
        They alone keep what they need, a cache for this cell above all.
        """


def check(contestants: Sequence[Contestant], vocab: int) -> dict[str, float]:
    """Relative difference of every other contestant's logits from the second one's, by name: the median of short
    prompts.

    Raises:
        CheckFailed: a logit is not finite, or the difference is too large. Nothing was timed then.
    """
    prompts = [[(17 * i * i + 3 * i + first) % vocab for i in range(CHECK_TOKENS)] for first in range(CHECK_PROMPTS)]
    found = {contestant.name: [contestant.logits(tokens) for tokens in prompts] for contestant in contestants}
    for name, logits in found.items():
        # Also true of NaN.
        if any(not abs(v) < float("inf") for each in logits for v in each):
            raise CheckFailed(f"{name}: logits are not finite; nothing was timed")
    if len(found) < 2:
        return {}
    second = contestants[1].name
    errors = {}
    for name, logits in found.items():
        if name == second:
            continue
        errors[name] = statistics.median(map(_difference, logits, found[second]))
        if not errors[name] <= ALLOWED_ERROR:
            raise CheckFailed(
                f"{name} and {second} differ by {errors[name]:.2%} in their logits, at most {ALLOWED_ERROR:.0%} is "
                "allowed; nothing was timed"
            )
    return errors


def _difference(found: Sequence[float], wanted: Sequence[float]) -> float:
    squares = sum((a - b) ** 2 for a, b in zip(found, wanted, strict=True))
    return (squares / sum(b * b for b in wanted)) ** 0.5


def run(
    contestants: Sequence[Contestant],
    batches: Sequence[int],
    contexts: Sequence[int],
    *,
    seconds: float,
    progress: Callable[[str], None] = lambda text: None,
) -> Iterator[Cell]:
    """Time every cell, the contestants in turns, since the speed of a machine changes over time. Those that do not fit
    into the memory beside the others come after them; those that do not fit alone are missing in the cell.

    A GPU sets its clock by the power of the last tenths of a second. In turns of one run, tens of milliseconds, all
    contestants would get the clock of their mean power (measured: a prefill of 2048 tokens 45.6 ms packed and 45.1
    dense in such turns, 43.7 and 46.8 each alone); in longer turns, each would begin with the clock of the one before.
    Hence each runs for ``settle_s`` before it is timed.

    Args:
        seconds: measuring time per contestant and cell, at least three prefills and six steps.
        progress: called with what is measured next.
    """
    for context in contexts:
        for batch in batches:
            progress(f"batch {batch}, context {context}")
            cell = Cell(batch, context, dict.fromkeys(each.name for each in contestants))
            waiting = list(contestants)
            while waiting:
                waiting = _race(waiting, cell, seconds)
            yield cell


def _race(contestants: Sequence[Contestant], cell: Cell, seconds: float) -> list[Contestant]:
    """Time contestants in turns, as many as fit beside each other.

    Returns:
        the others, to be tried without these.
    """
    opened: dict[str, tuple[Callable[[], float], Callable[[], float]]] = {}
    times: dict[str, tuple[list[float], list[float]]] = {each.name: ([], []) for each in contestants}
    rooms: dict[str, tuple[int, int]] = {}
    later: list[Contestant] = []

    def start(each: Contestant) -> None:
        opened[each.name] = each.open(cell.batch, cell.context)
        for run in opened[each.name]:
            run()

    def turn(which: int, least: int, each: Contestant) -> None:
        run = opened[each.name][which]
        times[each.name][which].extend(_turn(run, each.settle_s, seconds / TURNS, least))

    def attempt(each: Contestant, call: Callable[[Contestant], None]) -> None:
        needed, free = rooms[each.name]
        if needed <= free and not _lacks_memory(partial(call, each)):
            return
        opened.pop(each.name, None)
        gc.collect()
        if opened:
            later.append(each)
        else:
            least = "needs" if needed > free else "needs more than"
            sizes = f"{bytes_text(needed)} of cache, of {bytes_text(free)} that are free"
            cell.missing[each.name] = f"does not fit: {least} {sizes}"

    for each in contestants:
        rooms[each.name] = each.room(cell.batch, cell.context)
        attempt(each, start)
    for which, least in ((0, 1), (1, 2)):
        for _ in range(TURNS):
            for each in [each for each in contestants if each.name in opened]:
                attempt(each, partial(turn, which, least))
    for name in opened:
        prefills, steps = times[name]
        low, middle, high = statistics.quantiles(steps, n=4)
        cell.speeds[name] = Speed(statistics.median(prefills), middle, high - low)
    opened.clear()
    gc.collect()
    return later


def _lacks_memory(call: Callable[[], None]) -> bool:
    """Whether a call ends because there is not enough memory."""
    try:
        call()
    except Exception as error:
        if not isinstance(explain(error), OutOfMemoryError):
            raise
        return True
    return False


def _turn(run: Callable[[], float], settle_s: float, seconds: float, least: int) -> list[float]:
    """Times of as many runs as ``seconds`` hold, at least ``least``, after runs for ``settle_s`` that do not count."""
    end = time.perf_counter() + settle_s
    while time.perf_counter() < end:
        run()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < least or time.perf_counter() < end:
        times.append(run())
    return times


def document(
    contestants: Sequence[Contestant], cells: Sequence[Cell], *, model: str, device: str, errors: dict[str, float]
) -> dict:
    """The document of --json."""
    weights = {contestant.name: contestant.weight_bytes for contestant in contestants}
    ratio = contestants[0].weight_bytes / contestants[1].weight_bytes if len(contestants) > 1 else None
    return {
        "model": model,
        "device": device,
        "weight_bytes": weights,
        "weight_ratio": ratio,
        "logit_difference": errors.get(contestants[0].name, 0.0),
        "logit_differences": errors,
        "results": [cell.document() for cell in cells],
    }
