"""Load on an OpenAI-compatible server: open loop or closed, and what its clients see.

Open loop: requests come at random times (a Poisson process), whether the server keeps up or not, and a request's times
count from when it was due. Closed loop: a number of clients, each of which asks again as soon as it is answered.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from ..errors import InputError, TrirunError

# Of a client's point of view: seconds without any news before it gives up.
PATIENCE_S = 120


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of the server.

    Attributes:
        prompts: used in turn. max_tokens, temperature: of each answer. ignore_eos: answers have all their tokens.
        concurrency: clients of a closed loop; rate: requests per second of an open one. One of the two is given.
        requests: ends the load after so many. seconds: starts no request after so many. seed: of the arrival times.
    """

    prompts: Sequence[str]
    max_tokens: int = 64
    temperature: float = 0.0
    ignore_eos: bool = False
    concurrency: int | None = None
    rate: float | None = None
    requests: int | None = None
    seconds: float | None = None
    seed: int = 0


@dataclass(slots=True)
class Sample:
    """One request as its client saw it. Seconds count from when it was sent, or due.

    Attributes:
        prompt: which of the load's. first_s: until the first text, None where none came.
        gaps: seconds between chunks that brought text.
        text: the answer. error: what went wrong, None where nothing did.
        prompt_tokens, cached_tokens, generated_tokens: as the server counts them.
    """

    prompt: int
    first_s: float | None = None
    total_s: float = 0.0
    gaps: list[float] = field(default_factory=list)
    text: str = ""
    error: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0


@dataclass(frozen=True, slots=True)
class LoadResult:
    """All samples of a load, the seconds from the first request to the last answer, and those of a processor that the
    clients took: near as many, and it was they who were measured."""

    samples: list[Sample]
    seconds: float
    client_cpu_s: float

    def document(self) -> dict[str, Any]:
        """Counts, rates per second, and latencies: percentiles in milliseconds."""
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


class Client:
    """Asks a server. Use as ``async with``.

    Args:
        url: of the server, with or without /v1. api_key: sent as a Bearer token where given.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._base = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self.model = ""

    async def __aenter__(self) -> Client:
        timeout = aiohttp.ClientTimeout(total=None, sock_read=PATIENCE_S)
        # No limit: what waits in the client would not be the server's latency.
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=self._headers)
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._session.close()

    async def find_model(self) -> str:
        """The first model that the server lists; it is the one asked from now on.

        Raises:
            InputError: there is no such server, or it lists none.
        """
        try:
            async with self._session.get(f"{self._base}/models") as answer:
                if answer.status != 200:
                    raise InputError(f"{self._base}/models: status {answer.status}, {_message(await answer.text())}")
                self.model = (await answer.json())["data"][0]["id"]
        except (aiohttp.ClientError, OSError, ValueError, KeyError, IndexError) as error:
            raise InputError(f"{self._base}: no OpenAI-compatible server answers there ({error})") from error
        return self.model

    async def ask(self, load: Load, prompt: int, due: float | None = None) -> Sample:
        """One request; it never raises, what goes wrong is in the sample. ``due``: time its seconds count from."""
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": load.prompts[prompt],
            "max_tokens": load.max_tokens,
            "temperature": load.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if load.ignore_eos:
            body["ignore_eos"] = True
        sample = Sample(prompt)
        started = time.perf_counter() if due is None else due
        try:
            async with self._session.post(f"{self._base}/completions", json=body) as answer:
                if answer.status != 200:
                    sample.error = f"status {answer.status}: {_message(await answer.text())}"
                else:
                    await self._read(answer, sample, started)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            sample.error = f"{type(error).__name__}: {error}"
        sample.total_s = time.perf_counter() - started
        return sample

    async def _read(self, answer: aiohttp.ClientResponse, sample: Sample, started: float) -> None:
        pieces, last, done = [], 0.0, False
        async for line in answer.content:
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                done = True
                continue
            document = json.loads(line[6:])
            if not isinstance(document, dict):
                raise ValueError(f"a chunk is {line[6:40]!r}, not an object")
            if "error" in document:
                sample.error = f"error in the stream: {_message(line[6:].decode())}"
                return
            if usage := document.get("usage"):
                sample.prompt_tokens = usage.get("prompt_tokens") or 0
                sample.generated_tokens = usage.get("completion_tokens") or 0
                sample.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            for choice in document.get("choices") or ():
                if not choice.get("text"):
                    continue
                now = time.perf_counter()
                if last:
                    sample.gaps.append(now - last)
                else:
                    sample.first_s = now - started
                last = now
                pieces.append(choice["text"])
        sample.text = "".join(pieces)
        if not done:
            sample.error = "the stream ended without [DONE]"


async def run_load(client: Client, load: Load, progress: Callable[[int], None] = lambda done: None) -> LoadResult:
    """Put a load on a server and wait for every answer.

    Args:
        progress: is told how many requests have been answered.
    """
    samples: list[Sample] = []
    started, cpu = time.perf_counter(), time.process_time()
    asked = 0

    def more() -> int | None:
        """The prompt of the next request, if there is to be one."""
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

    async def again_and_again() -> None:
        while (prompt := more()) is not None:
            await ask(prompt)
            if samples[-1].error is not None:
                # A server that refuses at once is not to be asked in a tight loop.
                await asyncio.sleep(0.1)

    if load.rate is None:
        await asyncio.gather(*(again_and_again() for _ in range(load.concurrency or 1)))
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
    """The prompts, of those answered, whose answers differ from what a lone request gets.

    Raises:
        TrirunError: a lone request fails.
    """
    answers: dict[int, set[str]] = {}
    for sample in samples:
        if sample.error is None:
            answers.setdefault(sample.prompt, set()).add(sample.text)
    wrong = []
    for prompt, texts in sorted(answers.items()):
        alone = await client.ask(load, prompt)
        if alone.error is not None:
            raise TrirunError(f"a lone request failed: {alone.error}")
        if texts != {alone.text}:
            wrong.append(prompt)
    return wrong


def pick_prompts(text: str, *, count: int, words: int, seed: int) -> list[str]:
    """Prompts of so many words from anywhere in a text.

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
    """p50, p95, p99 and the mean in milliseconds; None of nothing."""
    if not seconds:
        return None
    ordered = sorted(seconds)

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return 1e3 * (ordered[low] + (ordered[high] - ordered[low]) * (place - low))

    return {"p50": at(0.5), "p95": at(0.95), "p99": at(0.99), "mean": 1e3 * sum(ordered) / len(ordered)}


def _message(text: str) -> str:
    with suppress(ValueError, KeyError, TypeError):
        return str(json.loads(text)["error"]["message"])
    return " ".join(text.split())[:200]
