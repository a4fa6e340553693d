"""A server in this process on a scripted model, and a real one on a packed checkpoint."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time

import httpx
import numpy as np
import pytest

pytest.importorskip("fastapi", reason="needs trirun[serve]")

from tests.interrupts import sigint_handled_by
from trirun_cli.engine.engine import Engine
from trirun_cli.engine.request import Request
from trirun_cli.engine.runner import Done, Outcome
from trirun_cli.engine.sampling import Token
from trirun_cli.engine.slot_cache import SlotCache
from trirun_cli.server.app import create_app
from trirun_cli.server.event_bridge import EventBridge
from trirun_cli.server.model import ServedModel
from trirun_cli.server.pool.entry import Source
from trirun_cli.server.pool.pool import Pool
from trirun_cli.server.tokenizer import ServerTokenizer
from trirun_cli.text.detokenizer import load_tokenizer
from trirun_cli.text.grammar import GrammarCompiler

END = 0
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('no such role') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


class ScriptedRunner:
    """Answers every prompt with ``script(request)``, then with the end token.

    Log-probabilities are made of the token id: −(id % 7) − 0.5, the alternatives the ids after it.
    """

    name, why_slower, max_rows, prompt_rows, lookahead, has_states = "scripted", "", 64, 64, 0, True

    def __init__(self, script, vocab_size, slots=4, context=64):
        self.script, self.vocab_size, self.slots, self.context = script, vocab_size, slots, context
        self.cache = SlotCache(slots, self.context)
        self.requests, self.todo, self.bound = {}, {}, []
        self.go, self.failure = threading.Event(), None
        self.go.set()

    def prepare(self):
        pass

    def bind(self, slot, request: Request, generated):
        self.requests[slot] = request
        self.todo[slot] = iter(list(self.script(request))[len(generated) :])
        self.bound.append(request)

    def launch(self, work):
        self.go.wait(20)
        if self.failure:
            raise self.failure
        time.sleep(0.001)
        return Done([self._outcome(item) for item in work])

    def _outcome(self, work):
        if work.states:
            return Outcome(None, states=np.array([[token, 1, 2, 3] for token in work.tokens], np.float32))
        params = self.requests[work.slot].params
        token = None
        if work.sample:
            token = self._token(next(self.todo[work.slot], END), params.logprobs)
        return Outcome(token, tuple(self._token(target, params.prompt_logprobs) for target in work.targets))

    def _token(self, token, alternatives):
        if alternatives is None:
            return Token(token)
        logprob = -(token % 7) - 0.5
        top = [(token + i, logprob - i) for i in range(alternatives)]
        return Token(token, logprob, tuple((id, value) for id, value in top if id < self.vocab_size))

    def close(self):
        pass


class Site:
    """A server on a scripted model, called without sockets. Use as ``async with``."""

    def __init__(
        self, tokenizer, script, *, slots=4, context=64, max_waiting=None, template=TEMPLATE, defaults=None, **options
    ):
        self.runner = ScriptedRunner(script, len(tokenizer), slots, context)
        self.engine = Engine(self.runner, max_waiting=max_waiting)
        served = ServerTokenizer(tokenizer, size=len(tokenizer), context=self.engine.context, chat_template=template)
        grammars = GrammarCompiler(tokenizer.backend_tokenizer, len(tokenizer), {END})
        ends = frozenset({END})
        self.model = ServedModel(self.engine, served, ends, defaults or {}, "as asked", grammars=grammars)
        self.pool = Pool([Source(["demo", "alias"], lambda: self.model)], max_waiting=max_waiting)
        self.app = create_app(self.pool, **options)

    async def __aenter__(self):
        self.engine.start()
        await self.pool.preload(EventBridge(asyncio.get_running_loop()), 1)
        self.pool.open()
        self.service = self.pool.entries[0].service
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://test")
        return self

    async def __aexit__(self, *exception):
        self.runner.go.set()
        await self.client.aclose()
        self.engine.close()

    async def post(self, path, body, **options):
        """(status, document) of a JSON request."""
        answer = await self.client.post(path, json=body, **options)
        return answer.status_code, answer.json()

    async def stream(self, path, body):
        """The documents of a stream, which must end with [DONE]."""
        answer = await self.client.post(path, json=body | {"stream": True})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        return events(answer.text)

    async def idle(self):
        """Wait until the engine holds nothing."""
        for _ in range(500):
            if self.engine.stats.running + self.engine.stats.waiting == 0:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"still at work: {self.engine.stats}")


def events(text):
    """The documents of a text of server-sent events, [DONE] checked and left out."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.fixture(scope="session")
def tokenizer(pytestconfig):
    return load_tokenizer(pytestconfig.rootpath / "configs" / "demo-model")


@pytest.fixture(scope="session")
def site(tokenizer):
    """Make a :class:`Site`: ``site(script, ...)``; a script that is a text is what every request is answered with."""

    def make(script="the sea was calm", **options):
        ids = tokenizer(script)["input_ids"] if isinstance(script, str) else None
        return Site(tokenizer, script if ids is None else lambda request: ids, **options)

    return make


@pytest.fixture(scope="session")
def check_error():
    """Check that an answer is an error in OpenAI's form with this status and param; its body's inside."""

    def check(answer, status, param=None):
        error = answer.json()["error"]
        assert answer.status_code == status and set(error) == {"message", "type", "param", "code"}
        assert error["message"] and error["param"] == param
        return error

    return check


@pytest.fixture(scope="session")
def checkpoint(pytestconfig, tmp_path_factory):
    """A packed checkpoint: the ternary model of ../shared, or else the demo model rounded to ternary."""
    from trirun_cli.workflows.pack import pack

    out = tmp_path_factory.mktemp("server") / "checkpoint"
    real = pytestconfig.rootpath.parent / "shared" / "models" / "bookshelf-28m-ternary"
    source = real if real.is_dir() else _rounded(pytestconfig.rootpath / "configs" / "demo-model", out.parent)
    pack(source, out)
    return out


def _rounded(source, parent):
    import shutil

    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float16)
    with torch.no_grad():
        for module in model.model.layers.modules():
            if isinstance(module, torch.nn.Linear):
                scale = module.weight.abs().mean()
                module.weight.copy_((module.weight / scale).round().clamp(-1, 1) * scale)
    model.save_pretrained(parent / "ternary")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(source / name, parent / "ternary")
    return parent / "ternary"


class Process:
    """``trirun serve`` in a process of its own, on a free port."""

    def __init__(self, root, models, *options):
        command = [sys.executable, "-m", "trirun_cli", "serve", *models, "--port", 0, "--json"]
        python_path = os.pathsep.join(str(root / part) for part in ("", "kernels", "gptq"))
        with sigint_handled_by():
            self.process = subprocess.Popen(
                [str(part) for part in (*command, *options)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ | {"PYTHONPATH": python_path},
            )
        document = line = ""
        while line != "}\n":
            line = self.process.stdout.readline()
            assert line, self.process.communicate()[1]
            document += line
        self.facts = json.loads(document)
        self.url = self.facts["url"]

    def metric(self, name):
        """A metric's value, summed over its labels."""
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"vllm:{name}{{"))

    def idle(self, seconds=20):
        """Wait until nothing runs or waits."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self.metric("num_requests_running") + self.metric("num_requests_waiting") == 0:
                return True
            time.sleep(0.05)
        return False

    def stop(self, number=signal.SIGTERM):
        """Send a signal; (exit code, what it wrote to stderr)."""
        self.process.send_signal(number)
        _, err = self.process.communicate(timeout=60)
        return self.process.returncode, err


@pytest.fixture(scope="session")
def start_server(pytestconfig, checkpoint):
    """Start a server process: ``start_server(*options, several=FOLDER)``; those still running at the end are killed."""
    started = []

    def start(*options, several=None):
        models = ("--checkpoint", checkpoint) if several is None else (several,)
        started.append(Process(pytestconfig.rootpath, models, *options))
        return started[-1]

    yield start
    for server in started:
        if server.process.poll() is None:
            server.process.kill()
            server.process.communicate()


@pytest.fixture(scope="module")
def server(start_server):
    """A server that a module's tests share, and that ends with them."""
    shared = start_server("--max-batch", "4", "--max-waiting", "8")
    yield shared
    shared.process.kill()
    shared.process.communicate()
