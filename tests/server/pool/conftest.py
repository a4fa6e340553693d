"""A server on several scripted models."""

import asyncio
import threading

import httpx
import pytest

from tests.server.conftest import END, TEMPLATE, ScriptedRunner
from trirun_cli.engine.engine import Engine
from trirun_cli.server.app import create_app
from trirun_cli.server.event_bridge import EventBridge
from trirun_cli.server.model import ServedModel
from trirun_cli.server.pool.entry import Source
from trirun_cli.server.pool.pool import Pool
from trirun_cli.server.tokenizer import ServerTokenizer
from trirun_cli.text.grammar import GrammarCompiler

PATH = "/v1/completions"
TEXTS = {"sea": "the sea was calm", "hill": "the old house stood", "wood": "a fox ran by"}


class House:
    """A server on a scripted model for each text. Use as ``async with``.

    Attributes:
        loads: names in the order of their loading. most: models that were ever loaded at once.
        gate: loads wait for it. failure: by name, what their loading raises.
    """

    def __init__(self, tokenizer, texts=TEXTS, **options):
        self.tokenizer, self.loads, self.most, self.alive = tokenizer, [], 0, set()
        self.gate, self.failure, self.runners = threading.Event(), {}, {}
        self.gate.set()
        sources = [Source([name], lambda name=name: self.load(name, texts[name]), context=48) for name in texts]
        self.pool = Pool(sources, **options)
        self.app = create_app(self.pool)

    def load(self, name, text):
        self.loads.append(name)
        assert self.gate.wait(20)
        if name in self.failure:
            raise self.failure[name]
        ids = self.tokenizer(text)["input_ids"]
        runner = self.runners[name] = ScriptedRunner(lambda request: ids, len(self.tokenizer))
        self.alive.add(name)
        self.most = max(self.most, len(self.alive))
        runner.close = lambda: self.alive.discard(name)
        engine = Engine(runner)
        served = ServerTokenizer(self.tokenizer, size=len(self.tokenizer), context=64, chat_template=TEMPLATE)
        grammars = GrammarCompiler(self.tokenizer.backend_tokenizer, len(self.tokenizer), {END})
        engine.start()
        return ServedModel(engine, served, frozenset({END}), {}, "as asked", grammars=grammars)

    async def __aenter__(self):
        await self.pool.preload(EventBridge(asyncio.get_running_loop()), 1)
        self.pool.open()
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://test")
        return self

    async def __aexit__(self, *exception):
        self.gate.set()
        for runner in self.runners.values():
            runner.go.set()
        await self.client.aclose()
        self.pool.close()

    async def ask(self, model, **fields):
        body = {"model": model, "prompt": "x", "max_tokens": 30, "temperature": 0} | fields
        return await self.client.post(PATH, json=body)

    async def text(self, model):
        answer = await self.ask(model)
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == model
        return answer.json()["choices"][0]["text"]

    async def states(self):
        return (await self.client.get("/health")).json()["models"]


async def until(true):
    for _ in range(1000):
        if true():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come to be")


@pytest.fixture
def house(tokenizer, monkeypatch):
    # A scripted model has no memory worth giving back, which takes a look at every object of this process each time.
    monkeypatch.setattr("trirun_cli.server.pool.entry.release_memory", lambda: None)
    return lambda *given, **options: House(tokenizer, *given, **options)
