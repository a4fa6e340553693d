"""Load on an OpenAI-compatible server, in an open or a closed loop, and what its clients measure.

Open loop: requests are sent at random times (a Poisson process), whether the server keeps up or not, and latencies
count from the time a request was due. Closed loop: each client sends its next request when it has the response.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import InputError, TrirunError
from .client import Client, Load, Sample


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The result of a load.

    Attributes:
        samples: of every request. seconds: from the first request to the last response.
        client_cpu_s: processor seconds of the clients; near ``seconds``, they limit the result and not the server.
    """

    samples: list[Sample]
    seconds: float
    client_cpu_s: float

    def document(self) -> dict[str, Any]:
        """The result for --json: counts, rates per second, and percentiles of latencies in milliseconds."""
        good = [sample for sample in self.samples if sample.error is None]
        generated = sum(sample.generated_tokens for sample in good)
        return {
            "requests": len(self.samples),
            "errors": dict(Counter(sample.error for sample in self.samples if sample.error is not None)),
            "seconds": round(self.seconds, 3),
            "client_cpu_share": self.client_cpu_s / self.seconds,
            "requests_per_s": len(good) / self.seconds,
            "generated_tokens": generated,
            "generated_tokens_per_s": generated / self.seconds,
            "prompt_tokens": sum(sample.prompt_tokens for sample in good),
            "prompt_tokens_cached": sum(sample.cached_tokens for sample in good),
            "latency_ms": {
                "time_to_first_token": _percentiles([s.first_s for s in good if s.first_s is not None]),
                "between_chunks": _percentiles([gap for sample in good for gap in sample.gaps]),
                "per_output_token": _percentiles(
                    [
                        (s.total_s - s.first_s) / (s.generated_tokens - 1)
                        for s in good
                        if s.first_s is not None and s.generated_tokens > 1
                    ]
                ),
                "end_to_end": _percentiles([sample.total_s for sample in good]),
            },
        }


async def run_load(client: Client, load: Load, progress: Callable[[int], None] = lambda done: None) -> LoadResult:
    """Put a load on a server and wait for every response.

    Args:
        progress: called with the number of requests that have ended.
    """
    samples: list[Sample] = []
    started, cpu = time.perf_counter(), time.process_time()
    asked = 0

    def more() -> int | None:
        """The prompt of the next request, None at the end of the load."""
        nonlocal asked
        if load.requests is not None and asked >= load.requests:
            return None
        if load.seconds is not None and time.perf_counter() - started >= load.seconds:
            return None
        asked += 1
        return (asked - 1) % len(load.prompts)

    async def ask(prompt: int, due: float | None = None) -> None:
        samples.append(await client.ask(load, prompt, due))
        progress(len(samples))

    async def closed_loop() -> None:
        while (prompt := more()) is not None:
            await ask(prompt)
            if samples[-1].error is not None:
                # Do not retry in a tight loop where the server refuses at once.
                await asyncio.sleep(0.1)

    if load.rate is None:
        await asyncio.gather(*(closed_loop() for _ in range(load.concurrency or 1)))
    else:
        arrivals, due, tasks = random.Random(load.seed), started, []
        while True:
            due += arrivals.expovariate(load.rate)
            await asyncio.sleep(max(due - time.perf_counter(), 0))
            if (prompt := more()) is None:
                break
            tasks.append(asyncio.ensure_future(ask(prompt, due)))
        await asyncio.gather(*tasks)
    return LoadResult(samples, time.perf_counter() - started, time.process_time() - cpu)


async def differing(client: Client, load: Load, samples: Sequence[Sample]) -> list[int]:
    """The prompts whose responses under load differ from the response to the same request alone.

    Args:
        samples: of the load; failed ones are left out.

    Raises:
        TrirunError: a request alone fails.
    """
    answers: dict[int, set[str]] = {}
    for sample in samples:
        if sample.error is None:
            answers.setdefault(sample.prompt, set()).add(sample.text)
    wrong = []
    for prompt, texts in sorted(answers.items()):
        alone = await client.ask(load, prompt)
        if alone.error is not None:
            raise TrirunError(f"a request alone failed: {alone.error}")
        if texts != {alone.text}:
            wrong.append(prompt)
    return wrong


def pick_prompts(text: str, *, count: int, words: int, seed: int) -> list[str]:
    """``count`` prompts of ``words`` words each, from random places of a text.

    Raises:
        InputError: the text is too short.
    """
    pieces = text.split()
    if len(pieces) < words:
        raise InputError(f"the text has {len(pieces)} words, fewer than a prompt of {words}")
    places = random.Random(seed)
    starts = [places.randrange(len(pieces) - words + 1) for _ in range(count)]
    return [" ".join(pieces[start : start + words]) for start in starts]


def _percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """p50, p95, p99 and the mean in milliseconds; None without values."""
    if not seconds:
        return None
    ordered = sorted(seconds)

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return 1e3 * (ordered[low] + (ordered[high] - ordered[low]) * (place - low))

    return {"p50": at(0.5), "p95": at(0.95), "p99": at(0.99), "mean": 1e3 * sum(ordered) / len(ordered)}
