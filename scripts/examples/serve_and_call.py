"""Start ``trirun serve`` and call it with OpenAI's own client: whole answers, streams, many at once.

pip install openai
python scripts/examples/serve_and_call.py CHECKPOINT
"""

import asyncio
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

from openai import AsyncOpenAI, OpenAI


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def wait_until_ready(url: str, server: subprocess.Popen, seconds: float = 120) -> None:
    """Return when the server answers /health.

    Raises:
        RuntimeError: it ended, or did not answer in time.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end and server.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=2).close()
        except (urllib.error.URLError, TimeoutError):
            time.sleep(0.2)
        else:
            return
    raise RuntimeError("the server did not become ready")


async def many(url: str, model: str, count: int) -> list[str]:
    """The answers to ``count`` requests that are under way at the same time."""
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        asked = [client.completions.create(model=model, prompt="The sea was", max_tokens=16, seed=i, temperature=0.8)
                 for i in range(count)]  # fmt: skip
        return [answer.choices[0].text for answer in await asyncio.gather(*asked)]


def main() -> None:
    """Serve the checkpoint of the command line, call it, stop it."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "trirun_cli", "serve", "--checkpoint", sys.argv[1], "--port", str(port)]
    with subprocess.Popen(command) as server:
        try:
            wait_until_ready(url, server)
            with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
                model = client.models.list().data[0].id
                answer = client.completions.create(model=model, prompt="The old house stood", max_tokens=16)
                print(f"{model}: {answer.choices[0].text!r}, {answer.usage.completion_tokens} tokens")
                for piece in client.completions.create(model=model, prompt="It was", max_tokens=16, stream=True):
                    print(piece.choices[0].text, end="", flush=True)
                print()
            texts = asyncio.run(many(url, model, 8))
            print(f"{len(texts)} answers at once, {len(set(texts))} different ones")
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
