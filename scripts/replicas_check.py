"""Replicas of ``trirun serve`` behind a router: what clients lose when one is drained and one is killed.

    python scripts/replicas_check.py CHECKPOINT --router haproxy
    python scripts/replicas_check.py CHECKPOINT --router vllm-router

Two servers take the requests of clients that ask without a pause. Then SIGTERM stops the first, which lets its answers
end; it is started again. SIGKILL ends the second, and with it the answers that it is writing; it is started again too.
Every answer is counted: an error is one of the killed server's if its request was under way at that moment. Any other
error is a failure: exit code 6. So is, on a CPU, an answer that differs from another to the same prompt; on a GPU
roundings depend on how many requests run at once, and texts may part where two tokens are nearly as likely.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from trirun_cli.bench.client import Client, Load, Sample
from trirun_cli.bench.serve import pick_prompts
from trirun_cli.resources import configs_dir

CONFIG = Path(__file__).resolve().parent / "examples" / "haproxy.cfg"
START_S = 120
# Between the moment that is taken and the end of the process that is killed then.
GRACE_S = 0.05


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


async def healthy(url: str) -> None:
    """Return when a server answers /health."""

    def answers() -> bool:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2):
                return True
        except OSError:
            return False

    end = time.monotonic() + START_S
    while not await asyncio.to_thread(answers):
        if time.monotonic() > end:
            raise SystemExit(f"{url} was not healthy after {START_S} s")
        await asyncio.sleep(0.1)


class Replica:
    """A server on a port that it keeps when it is started again."""

    def __init__(self, checkpoint: Path, options: list[str], gpu: str | None) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [sys.executable, "-m", "trirun_cli", "serve", str(checkpoint), "--port", str(self.port)]
        self._command += ["--quiet", *options]
        self._environment = os.environ | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})

    async def start(self) -> None:
        self._process = subprocess.Popen(self._command, env=self._environment, start_new_session=True)
        await healthy(self.url)

    async def running(self) -> int:
        """Answers that it is writing, or that wait for it."""
        text = (await asyncio.to_thread(urllib.request.urlopen, f"{self.url}/metrics")).read().decode()
        lines = [line.rpartition(" ") for line in text.splitlines() if line.startswith("vllm:num_requests_")]
        return int(sum(float(value) for _, _, value in lines))

    async def stop(self, number: signal.Signals) -> int:
        """Send a signal; the exit code."""
        self._process.send_signal(number)
        return await asyncio.to_thread(self._process.wait)


def start_router(kind: str, port: int, replicas: list[Replica]) -> subprocess.Popen[bytes]:
    program = shutil.which(kind)
    if program is None:
        raise SystemExit(f"{kind} is not on PATH")
    if kind == "haproxy":
        names = {"ROUTER": f"127.0.0.1:{port}"}
        names |= {f"REPLICA_{name}": f"127.0.0.1:{each.port}" for name, each in zip("AB", replicas, strict=True)}
        return subprocess.Popen([program, "-f", str(CONFIG), "-q"], env=os.environ | names)
    command = [program, "--port", str(port), "--policy", "cache_aware", "--health-check-interval-secs", "1"]
    # A server that comes back is used again at once; a circuit that opens would stay open for a minute.
    command += ["--health-failure-threshold", "1", "--health-success-threshold", "1", "--disable-circuit-breaker"]
    # A request that a stopped server refuses is tried again until after the next look at its health.
    command += ["--retry-max-retries", "8", "--retry-initial-backoff-ms", "100", "--balance-abs-threshold", "8"]
    command += ["--log-level", "error", "--worker-startup-check-interval", "1", "--prometheus-port", str(free_port())]
    return subprocess.Popen([*command, "--worker-urls", *(each.url for each in replicas)], stdout=sys.stderr)


async def client(url: str, name: int, load: Load, end: float, samples: list[tuple[float, float, Sample]]) -> None:
    """Ask without a pause; a session's requests carry its name, by which a router may choose."""
    async with Client(url, headers={"X-Session-ID": f"session-{name}"}) as session:
        session.model = "m"
        turn = name
        while time.perf_counter() < end:
            started = time.perf_counter()
            sample = await session.ask(load, turn % len(load.prompts))
            samples.append((started, time.perf_counter(), sample))
            turn += 1
            if sample.error is not None:
                await asyncio.sleep(0.2)


def counts(samples: list[tuple[float, float, Sample]], killed: float) -> dict[str, object]:
    """What became of requests, each with the times of its start and its end, when a server was killed at a time."""
    failed = [(start, stop, sample) for start, stop, sample in samples if sample.error is not None]
    of_killed = [each for each in failed if each[0] <= killed + GRACE_S and each[1] >= killed]
    others = [sample for start, stop, sample in failed if (start, stop, sample) not in of_killed]
    texts: dict[int, set[str]] = {}
    for _, _, sample in samples:
        if sample.error is None:
            texts.setdefault(sample.prompt, set()).add(sample.text)
    return {
        "requests": len(samples),
        "answered": len(samples) - len(failed),
        "lost_with_the_killed_server": len(of_killed),
        "lost_otherwise": len(others),
        "errors": sorted({str(sample.error) for sample in others}),
        "prompts_with_two_answers": sum(len(found) > 1 for found in texts.values()),
    }


async def measure(given: argparse.Namespace) -> dict[str, object]:
    """The counts of one run."""
    text = (configs_dir() / "demo-model" / "valid.txt").read_text()
    load = Load(pick_prompts(text, count=64, words=24, seed=0), max_tokens=given.tokens, ignore_eos=True)
    options = ["--served-model-name", "m", "--max-batch", str(given.clients), "--drain", "120", *given.options.split()]
    first, second = replicas = [Replica(given.checkpoint, options, gpu) for gpu in given.gpus or (None, None)]
    await asyncio.gather(*(each.start() for each in replicas))
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    router = start_router(given.router, port, replicas)
    samples: list[tuple[float, float, Sample]] = []
    try:
        await healthy(url)
        began = time.perf_counter()
        end = began + given.seconds
        running = [asyncio.create_task(client(url, name, load, end, samples)) for name in range(given.clients)]
        await asyncio.sleep(given.seconds / 5)
        drained = time.perf_counter()
        code = await first.stop(signal.SIGTERM)
        drain_s = time.perf_counter() - drained
        await first.start()
        # Until the router has seen that it is back, and requests are spread again.
        await asyncio.sleep(given.seconds / 5)
        running_there = await second.running()
        killed = time.perf_counter()
        await second.stop(signal.SIGKILL)
        await second.start()
        if time.perf_counter() > end:
            raise SystemExit(f"--seconds {given.seconds:g} were over before both servers were back")
        await asyncio.gather(*running)
    finally:
        router.terminate()
        router.wait()
        for each in replicas:
            await each.stop(signal.SIGTERM)
    return {
        "router": given.router,
        "clients": given.clients,
        "seconds": round(time.perf_counter() - began, 1),
        "drain_s": round(drain_s, 1),
        "drain_exit_code": code,
        "under_way_at_sigterm": sum(start < drained < stop for start, stop, _ in samples),
        "under_way_at_sigkill": sum(start < killed < stop for start, stop, _ in samples),
        "running_on_the_killed_server": running_there,
        **counts(samples, killed),
    }


def main() -> None:
    """Measure once, print the counts as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="packed checkpoint")
    parser.add_argument("--router", choices=("haproxy", "vllm-router"), default="haproxy", help="found on PATH")
    parser.add_argument("--clients", type=int, default=64, help="that ask without a pause")
    parser.add_argument("--tokens", type=int, default=32, help="of an answer")
    parser.add_argument("--seconds", type=float, default=90, help="in which requests are started")
    parser.add_argument("--gpus", nargs=2, metavar=("A", "B"), help="the GPU of each server; default: as they choose")
    parser.add_argument("--options", default="", help="more options of trirun serve")
    given = parser.parse_args()
    found = asyncio.run(measure(given))
    print(json.dumps(found, indent=2))
    bad = found["lost_otherwise"] or found["drain_exit_code"]
    bad = bad or (found["prompts_with_two_answers"] and not given.gpus)
    sys.exit(6 if bad else 0)


if __name__ == "__main__":
    main()
