"""A client of an OpenAI-compatible server that measures what it gets."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from ..errors import InputError

# Seconds without data after which a client gives up.
READ_TIMEOUT_S = 120


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of a benchmark.

    Attributes:
        prompts: used in turn. max_tokens, temperature: of each request. ignore_eos: generate all of ``max_tokens``.
        concurrency: clients of a closed loop; rate: requests per second of an open one. One of the two is set.
        requests: their number, None for no limit. seconds: after which no request is started. seed: of arrival times.
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
    """One request as its client saw it. Seconds count from when it was sent, or due in an open loop.

    Attributes:
        prompt: its index in the load. first_s: to the first text, None without any. total_s: to the end.
        gaps: seconds between chunks with text. text: of the response. error: for people, None where it succeeded.
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


class Client:
    """A client of a server. Use as ``async with``.

    Args:
        url: of the server, with or without /v1. api_key: Bearer token, if any. headers: of every request besides.

    Attributes:
        model: that requests ask for; set by :meth:`find_model`.
    """

    def __init__(self, url: str, api_key: str | None = None, headers: Mapping[str, str] | None = None) -> None:
        self._base = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = dict(headers or {}) | ({} if api_key is None else {"Authorization": f"Bearer {api_key}"})
        self.model = ""

    async def __aenter__(self) -> Client:
        timeout = aiohttp.ClientTimeout(total=None, sock_read=READ_TIMEOUT_S)
        # No limit of connections: waiting in the client would count as the server's latency.
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=self._headers)
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._session.close()

    async def find_model(self) -> str:
        """The first model that the server lists; requests ask for it from now on.

        Raises:
            InputError: there is no such server, or it lists none.
        """
        try:
            async with self._session.get(f"{self._base}/models") as answer:
                if answer.status != 200:
                    raise InputError(f"{self._base}/models: status {answer.status}, {_message(await answer.text())}")
                self.model = str((await answer.json())["data"][0]["id"])
        except (aiohttp.ClientError, OSError, ValueError, TypeError, LookupError, RecursionError) as error:
            raise InputError(f"{self._base}: no OpenAI-compatible server answers there ({error})") from error
        return self.model

    async def ask(self, load: Load, prompt: int, due: float | None = None) -> Sample:
        """Send a request. Errors are in the sample, never raised.

        Args:
            prompt: index in the load. due: the time that seconds count from, by time.perf_counter; None is now.
        """
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
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, RecursionError) as error:
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
            try:
                text = _taken(document, sample)
            except (AttributeError, TypeError) as error:
                raise ValueError(f"a chunk is {line[6:200]!r}, which no completion has ({error})") from None
            if not text:
                continue
            now = time.perf_counter()
            if last:
                sample.gaps.append(now - last)
            else:
                sample.first_s = now - started
            last = now
            pieces.append(text)
        sample.text = "".join(pieces)
        if not done:
            sample.error = "the stream ended without [DONE]"


def _taken(document: dict[str, Any], sample: Sample) -> str:
    """The text of a chunk, whose counts of tokens, if any, are put into the sample.

    Raises:
        AttributeError, TypeError: a part of it is of another kind.
    """
    if usage := document.get("usage"):
        counts = (
            usage.get("prompt_tokens") or 0,
            usage.get("completion_tokens") or 0,
            (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        )
        if not all(type(count) is int for count in counts):
            raise TypeError("a count of tokens is no integer")
        sample.prompt_tokens, sample.generated_tokens, sample.cached_tokens = counts
    return "".join(choice.get("text") or "" for choice in document.get("choices") or ())


def _message(text: str) -> str:
    with suppress(ValueError, KeyError, TypeError):
        return str(json.loads(text)["error"]["message"])
    return " ".join(text.split())[:200]
