"""64 clients of one server, all kinds of requests at once: are answers exact, is memory flat, do others notice.

    python scripts/server_mix.py CHECKPOINT [--clients 64] [--seconds 600] [--plain 60] [--json]

The server is ``trirun serve`` in a process of its own. Every request is one of a few dozen, whose answers are asked for
one by one before: completions, grammars, tools, long prompts, embeddings; some clients leave in the middle. First all
clients stream completions alone (``--plain`` seconds), then the mix; the time between tokens is that of streamed
completions in both. At last, as long as at first, half of the requests are such as must be refused: endless templates,
heavy bodies, absurd grammars; what counts then is how long the server's event loop was blocked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import httpx

TEMPLATE = (
    "{% if tools %}{% for t in tools %}{{ t.function.name }} {% endfor %}<tool_call></tool_call>{% endif %}"
    "{% if endless is defined %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    "{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "colour": {"enum": ["red", "green", "blue"]},
    },
    "required": ["name", "age", "colour"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "note", "parameters": SCHEMA}}
COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
HELLO = [{"role": "user", "content": "Who was it?"}]
# Of a hundred requests of the mix.
SHARES = {"plain": 40, "grammar": 15, "tools": 10, "long": 10, "embedding": 10, "leaves": 15}
HOSTILE = {"plain": 50, "refused": 50}
Ask = tuple[str, dict[str, Any]]


def requests_of(kind: str) -> list[Ask]:
    """The different requests of a kind."""
    if kind == "plain":
        texts = ("The ship", "He said", "In the morning", "A letter")
        bodies = [{"prompt": text, "max_tokens": 64, "seed": seed} for text in texts for seed in (1, 2)]
        return [(COMPLETIONS, body | {"ignore_eos": True}) for body in bodies]
    if kind == "grammar":
        bodies = [{"prompt": "A person:", "max_tokens": 100, "guided_json": SCHEMA, "seed": seed} for seed in range(4)]
        bodies += [{"prompt": "A code:", "max_tokens": 40, "guided_regex": "[A-F]{3}-[0-9]{4}", "seed": 1}]
        return [(COMPLETIONS, body) for body in bodies]
    if kind == "tools":
        body = {"messages": HELLO, "tools": [TOOL], "tool_choice": "required", "max_tokens": 150}
        return [(CHAT, body | {"parallel_tool_calls": False, "seed": seed}) for seed in range(3)]
    if kind == "long":
        prompts = [f"{word} went on. " * 150 for word in ("He", "It")]
        return [(COMPLETIONS, {"prompt": prompt, "max_tokens": 8, "seed": 1}) for prompt in prompts]
    if kind == "embedding":
        texts = ["a calm sea", "the old house"]
        return [(EMBEDDINGS, {"input": texts, "pooling": pooling}) for pooling in ("mean", "last")]
    if kind == "leaves":
        return [(COMPLETIONS, {"prompt": "A long tale", "max_tokens": 300, "seed": 1, "ignore_eos": True})]
    return [
        (CHAT, {"messages": HELLO, "chat_template_kwargs": {"endless": 1}}),
        (COMPLETIONS, {"prompt": [5] * 500_000}),
        (COMPLETIONS, {"prompt": "word " * 300_000}),
        (COMPLETIONS, {"prompt": "x", "guided_grammar": "start: A\nA: " + " & ".join(["/.*a.{9}.*/"] * 30)}),
        (COMPLETIONS, {"prompt": "x", "guided_json": {"anyOf": [{"const": i} for i in range(60_000)]}}),
    ]


def content_of(path: str, answer: Any) -> Any:
    """What of an answer must be the same every time."""
    if path == EMBEDDINGS:
        return [each["embedding"] for each in answer["data"]]
    choice = answer["choices"][0]
    if path == COMPLETIONS:
        return choice["text"], choice["finish_reason"]
    calls = [call["function"] for call in choice["message"].get("tool_calls") or []]
    return choice["message"]["content"], calls, choice["finish_reason"]


class Mix:
    """What clients of a server ask, and what they see."""

    def __init__(self, url: str) -> None:
        limits = httpx.Limits(max_connections=None)
        self.http = httpx.AsyncClient(base_url=url, timeout=300, limits=limits)
        self.expected: dict[str, Any] = {}
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self.gaps: list[float] = []

    async def learn(self) -> None:
        """Ask for every answer once, one by one."""
        for kind in SHARES:
            if kind != "leaves":
                for path, body in requests_of(kind):
                    answer = await self.http.post(path, json=body)
                    answer.raise_for_status()
                    self.expected[json.dumps([path, body])] = content_of(path, answer.json())

    async def client(self, number: int, until: float, kinds: dict[str, int]) -> None:
        """Ask until then."""
        choose = random.Random(number)
        while time.monotonic() < until:
            (kind,) = choose.choices(list(kinds), list(kinds.values()))
            path, body = choose.choice(requests_of(kind))
            self.counts[kind] += 1
            try:
                if kind in ("plain", "leaves"):
                    await self._stream(body, leave_after=choose.randrange(1, 20) if kind == "leaves" else None)
                    continue
                answer = await self.http.post(path, json=body)
                if kind == "refused":
                    if answer.status_code not in (400, 413):
                        self.faults.append(f"{kind}: status {answer.status_code}")
                elif answer.status_code != 200:
                    self.faults.append(f"{kind}: status {answer.status_code} {answer.text[:200]}")
                elif content_of(path, answer.json()) != self.expected[json.dumps([path, body])]:
                    self.faults.append(f"{kind}: another answer to {json.dumps(body)[:100]}")
            except httpx.HTTPError as error:
                self.faults.append(f"{kind}: {type(error).__name__} {error}")

    async def _stream(self, body: dict[str, Any], leave_after: int | None) -> None:
        text, finish, last, chunks = "", None, 0.0, 0
        async with self.http.stream("POST", COMPLETIONS, json=body | {"stream": True}) as answer:
            if answer.status_code != 200:
                self.faults.append(f"stream: status {answer.status_code}")
                return
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                now = time.perf_counter()
                choice = json.loads(line[6:])["choices"][0]
                if last and leave_after is None:
                    self.gaps.append(now - last)
                last, chunks = now, chunks + 1
                text, finish = text + choice["text"], choice["finish_reason"]
                if chunks == leave_after:
                    return
        if leave_after is None and (text, finish) != self.expected[json.dumps([COMPLETIONS, body])]:
            self.faults.append(f"stream: another text than {text[:60]!r}")

    async def phase(self, clients: int, seconds: float, kinds: dict[str, int]) -> dict[str, Any]:
        """Run clients for some time: their counts, times between tokens, and the server's memory meanwhile."""
        self.counts.clear()
        self.gaps = []
        until, began = time.monotonic() + seconds, time.monotonic()
        work = [asyncio.ensure_future(self.client(number, until, kinds)) for number in range(clients)]
        memory = []
        while time.monotonic() < until:
            await asyncio.sleep(min(5, max(until - time.monotonic(), 0)))
            memory.append((time.monotonic() - began, await self.metric("process_resident_memory_bytes") / 2**20))
        await asyncio.gather(*work)
        cuts = quantiles(self.gaps, n=100) if len(self.gaps) > 1 else [0.0] * 99
        times = {"p50": cuts[49] * 1e3, "p99": cuts[98] * 1e3, "most": max(self.gaps, default=0) * 1e3}
        return {"seconds": seconds, "requests": dict(self.counts), "between_ms": times, "memory_mib": memory}

    async def metric(self, name: str) -> float:
        """A metric's value, summed over its labels."""
        lines = (await self.http.get("/metrics")).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))

    async def loop(self) -> dict[str, float]:
        """The longest delay of the server's event loop so far in ms, and the most of its own work in one."""
        names = ("delay", "busy")
        return {name: await self.metric(f"trirun:event_loop_{name}_max_seconds") * 1e3 for name in names}

    async def idle(self) -> bool:
        """Wait until the engine holds nothing; whether it comes to that."""
        for _ in range(200):
            held = await self.metric("vllm:num_requests_running") + await self.metric("vllm:num_requests_waiting")
            if not held:
                return True
            await asyncio.sleep(0.05)
        return False


async def measure(url: str, options: argparse.Namespace) -> dict[str, Any]:
    """Both phases on a running server."""
    mix = Mix(url)
    await mix.learn()
    plain = await mix.phase(options.clients, options.plain, {"plain": 1})
    mixed = await mix.phase(options.clients, options.seconds, SHARES)
    loop = await mix.loop()
    hostile = await mix.phase(options.clients // 8, options.plain, HOSTILE)
    idle = await mix.idle()
    memory = mixed["memory_mib"]
    third = max(len(memory) // 3, 1)
    found = {
        "clients": options.clients,
        "plain": plain,
        "mixed": mixed,
        "hostile": hostile,
        "faults": len(mix.faults),
        "first_faults": mix.faults[:20],
        "idle_afterwards": idle,
        "memory_first_third_mib": median(value for _, value in memory[:third]),
        "memory_last_third_mib": median(value for _, value in memory[-third:]),
        "between_p99_ratio": mixed["between_ms"]["p99"] / plain["between_ms"]["p99"],
        "loop_most_ms": loop,
        "loop_most_with_hostile_ms": await mix.loop(),
    }
    await mix.http.aclose()
    return found


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--plain", type=float, default=60)
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument("server", nargs="*", help="options of trirun serve, after --")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder) / "template.jinja"
        template.write_text(TEMPLATE)
        command = [sys.executable, "-m", "trirun_cli", "serve", str(options.checkpoint), "--port", "0", "--json"]
        command += ["--max-batch", str(options.clients), "--stream-interval", "0", "--chat-template", str(template)]
        server = subprocess.Popen([*command, *options.server], stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            document = ""
            while not document.endswith("\n}\n"):
                line = server.stdout.readline()
                if not line:
                    raise SystemExit("the server did not start")
                document += line
            found = asyncio.run(measure(json.loads(document)["url"], options))
        finally:
            server.terminate()
            server.wait()
    if options.json:
        print(json.dumps(found, indent=2))
        return
    times = (found["plain"]["between_ms"], found["mixed"]["between_ms"])
    requests = found["mixed"]["requests"]
    print(f"{sum(requests.values())} requests of {found['clients']} clients: {requests}")
    print(f"faults: {found['faults']}; idle afterwards: {found['idle_afterwards']}")
    print(*found["first_faults"], sep="\n")
    print(f"memory: {found['memory_first_third_mib']:.0f} MiB, then {found['memory_last_third_mib']:.0f} MiB")
    print("between tokens, ms: plain", *(f"{name} {value:.1f}" for name, value in times[0].items()))
    print("between tokens, ms: mixed", *(f"{name} {value:.1f}" for name, value in times[1].items()))
    print(f"p99 mixed / plain: {found['between_p99_ratio']:.2f}")
    for name, key in (("the mix", "loop_most_ms"), ("what is refused", "loop_most_with_hostile_ms")):
        longest = found[key]
        print(f"event loop up to {name}: {longest['delay']:.0f} ms late, {longest['busy']:.0f} ms of them at work")


if __name__ == "__main__":
    main()
