"""Load one ``trirun serve`` with everything at once, and see that it stays as it was.

    python scripts/soak.py CHECKPOINT --minutes 30
    python scripts/soak.py CHECKPOINT --minutes 8 --device cuda

Clients ask greedily, whole and streamed, more of them than there are slots; others reset the connection in the middle
of a stream, leave it, read it byte by byte, send too much, or send what is no request; the server is stopped by SIGSTOP
for a second now and then. Held to: every answer of a client that waits for it is the one that it gets alone (or 429,
which is counted); nothing but 4xx to what is wrong; memory and threads no more in the last third than in the second;
descriptors no more after it all than before; no request left running. Exit code 6 where one of these does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

PROMPTS = ["The sea", "Once upon a time", "She said that", "In the morning", "A house on the hill", "They walked"]
TOKENS, SLOTS, PERIOD_S = 24, 4, 5.0
MEMORY_MIB, DESCRIPTORS, THREADS = 32, 3, 2  # that a server may have more at the end


class Server:
    """``trirun serve`` in a process of its own.

    Args:
        checkpoint: a packed directory. options: further options of the command.
    """

    def __init__(self, checkpoint: Path, options: list[str]) -> None:
        command = [sys.executable, "-m", "trirun_cli", "serve", str(checkpoint), "--port", "0", "--json", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert self.process.stdout is not None
        text = ""
        while line := self.process.stdout.readline():
            text += line
            if (found := re.search(r"http://127\.0\.0\.1:(\d+)", text)) is not None:
                self.port = int(found[1])
                return
        raise SystemExit(f"the server did not start: {text}")

    def state(self) -> tuple[float, int, int]:
        """(resident MiB, open descriptors, threads)."""
        place = Path("/proc") / str(self.process.pid)
        status = dict(line.split(":", 1) for line in (place / "status").read_text().splitlines() if ":" in line)
        threads = int(status["Threads"])
        return int(status["VmRSS"].split()[0]) / 1024, len(list((place / "fd").iterdir())), threads


def request(path: str, body: bytes, length: int | None = None) -> bytes:
    """An HTTP request that ends its connection."""
    size = len(body) if length is None else length
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {size}\r\n\r\n".encode() + body


def completion(prompt: str, *, stream: bool = False, tokens: int = TOKENS) -> bytes:
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": stream}
    return request("/v1/completions", json.dumps(body).encode())


def text_of(answer: bytes) -> str | None:
    """The text of a whole or a streamed answer; None where it is an error."""
    head, _, body = answer.partition(b"\r\n\r\n")
    if b" 200 " not in head.split(b"\r\n")[0]:
        return None
    if b"text/event-stream" not in head:
        # Bodies in chunks have their sizes between them.
        found = re.search(rb"\{.*\}", body, re.DOTALL)
        return json.loads(found[0])["choices"][0]["text"] if found else None
    parts = [json.loads(line) for line in re.findall(rb"data: (\{.*\})", body)]
    return "".join(part["choices"][0]["text"] for part in parts if part.get("choices")) if b"[DONE]" in body else None


class Load:
    """The clients, and what they have seen.

    Args:
        port: of the server. expected: the text of each prompt, alone.
    """

    def __init__(self, port: int, expected: dict[str, str], seed: int) -> None:
        self.port, self.expected, self.rng = port, expected, random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []

    async def talk(self, sent: bytes, *, read: int = -1, reset: bool = False) -> bytes:
        """Send bytes, and read the answer, or so much of it."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(sent)
            await writer.drain()
            return await (reader.read() if read < 0 else reader.read(read))
        except ConnectionError:
            return b""
        finally:
            if reset:
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.close()

    async def exact(self, stream: bool) -> None:
        prompt = self.rng.choice(PROMPTS)
        answer = await self.talk(completion(prompt, stream=stream))
        text = text_of(answer)
        if text is None and b" 429 " in answer[:20]:
            self.counts["refused as too many"] += 1
        elif text != self.expected[prompt]:
            self.faults.append(f"{prompt!r}, stream {stream}: {text!r} for {answer[:80]!r}")
        self.counts["exact streams" if stream else "exact answers"] += text == self.expected[prompt]

    async def leaves(self, reset: bool) -> None:
        await self.talk(completion("The sea", stream=True, tokens=200), read=self.rng.randint(1, 900), reset=reset)
        self.counts["reset" if reset else "left"] += 1

    async def slow(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(completion("The sea", stream=True))
            answer = b""
            while part := await reader.read(64 if len(answer) > 512 else 16):
                answer += part
                await asyncio.sleep(0.05)
            if text_of(answer) == self.expected["The sea"]:
                self.counts["exact, read slowly"] += 1
            elif b" 429 " not in answer[:20]:
                self.faults.append(f"read slowly: {answer[-200:]!r}")
        except ConnectionError:
            self.counts["slow, and closed by the server"] += 1
        finally:
            writer.close()

    async def wrong(self) -> None:
        rng = self.rng
        deep = b"[" * 100_000
        kinds = [
            ("bytes", rng.randbytes(rng.randint(1, 5000)) + b"\r\n\r\n"),
            ("no JSON", request("/v1/completions", b"{" + rng.randbytes(50))),
            ("nested JSON", request("/v1/chat/completions", deep)),
            ("wrong types", request("/v1/completions", json.dumps({"prompt": {"a": [1]}, "max_tokens": "x"}).encode())),
            ("too long a prompt", completion("a b c " * 20_000)),
            ("too large a body", request("/v1/completions", b" " * 4096, 10**12)),
            ("no such path", request("/v2/nothing", b"{}")),
            ("huge numbers", request("/v1/completions", b'{"prompt": "x", "max_tokens": 1e400, "seed": -1e400}')),
        ]
        name, sent = rng.choice(kinds)
        try:
            answer = await asyncio.wait_for(self.talk(sent), 60)
        except TimeoutError:
            self.faults.append(f"{name}: no answer in 60 s")
            return
        status = int(answer[9:12]) if answer[:9] == b"HTTP/1.1 " else 400 * (not answer)
        self.counts[f"wrong: {name}"] += 1
        if not 400 <= status < 500:
            self.faults.append(f"{name}: {answer[:200]!r}")

    async def again(self, name: str, end: float, *arguments: Any) -> None:
        """Repeat one kind of client until the end."""
        while time.monotonic() < end:
            try:
                await getattr(self, name)(*arguments)
            except (ConnectionError, OSError) as error:
                self.faults.append(f"{name}: {type(error).__name__}: {error}")
                await asyncio.sleep(1)
            await asyncio.sleep(self.rng.random() * 0.1)


async def pauses(server: Server, end: float) -> None:
    """Stop the server's threads for a second now and then."""
    while time.monotonic() < end:
        await asyncio.sleep(30)
        os.kill(server.process.pid, signal.SIGSTOP)
        await asyncio.sleep(1)
        os.kill(server.process.pid, signal.SIGCONT)


async def watch(server: Server, end: float) -> list[tuple[float, int, int]]:
    states = []
    while time.monotonic() < end:
        await asyncio.sleep(PERIOD_S)
        states.append(server.state())
    return states


async def soak(server: Server, minutes: float, seed: int) -> dict[str, Any]:
    """Run the load; what was seen, and "faults"."""
    load = Load(server.port, {}, seed)
    for prompt in PROMPTS:
        text = text_of(await load.talk(completion(prompt)))
        if text is None:
            raise SystemExit(f"no answer to {prompt!r}")
        load.expected[prompt] = text
    end, descriptors = time.monotonic() + 60 * minutes, server.state()[1]
    kinds = (
        [("exact", False)] * 4 + [("exact", True)] * 4 + [("leaves", True), ("leaves", False), ("slow",), ("wrong",)]
    )
    clients = [load.again(name, end, *arguments) for name, *arguments in kinds]
    states, *_ = await asyncio.gather(watch(server, end), pauses(server, end), *clients)
    # Until connections that are kept open are closed.
    await asyncio.sleep(8)
    more_open = server.state()[1] - descriptors
    metrics = await load.talk(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    left = {m[0].decode(): float(m[1]) for m in re.findall(rb"vllm:(num_requests_\w+)\S* ([\d.]+)", metrics)}
    load.faults += [f"at the end {name} is {value}" for name, value in left.items() if value]
    load.faults += [] if left else ["no metrics at the end"]
    third = len(states) // 3
    early, late = states[third : 2 * third] or states, states[2 * third :]
    growth: dict[str, float] = {"descriptors": more_open}
    for what, i, most in (("MiB", 0, MEMORY_MIB), ("threads", 2, THREADS)):
        growth[what] = statistics.median(s[i] for s in late) - statistics.median(s[i] for s in early)
        if growth[what] > most:
            load.faults.append(f"{growth[what]:.1f} more {what} in the last third than in the second")
    if more_open > DESCRIPTORS:
        load.faults.append(f"{more_open} more descriptors after all requests than before")
    shown = states[:: max(1, len(states) // 12)]
    return {
        "minutes": minutes,
        "counts": dict(load.counts),
        "growth": growth,
        "MiB": [round(state[0]) for state in shown],
        "descriptors": [state[1] for state in shown],
        "faults": load.faults[:20],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    server = Server(options.checkpoint, ["--device", options.device, "--max-batch", str(SLOTS)])
    try:
        report = asyncio.run(soak(server, options.minutes, options.seed))
    finally:
        server.process.send_signal(signal.SIGCONT)
        server.process.send_signal(signal.SIGTERM)
        code = server.process.wait(timeout=60)
    report["exit code"] = code
    print(json.dumps(report, indent=1))
    return 6 if report["faults"] or code not in (0, -signal.SIGTERM, 130, 143) else 0


if __name__ == "__main__":
    sys.exit(main())
