"""What scripts/fuzz.py feeds to the server, and to a client of one."""

from __future__ import annotations

import asyncio
import json
import re
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from fuzz_seeds import NoInput, value
from fuzz_texts import letters

from trirun_cli.errors import TrirunError

PATHS = (
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
    "/v1/embeddings", "/tokenize", "/detokenize",
)  # fmt: skip
_SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
_SAMPLING = {
    "n": 1, "temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "seed": 1, "stop": ["x"], "min_tokens": 0,
    "presence_penalty": 0.5, "repetition_penalty": 1.1, "logit_bias": {"5": 1}, "allowed_token_ids": [1, 2],
}  # fmt: skip
_FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}}
BODIES: list[tuple[str, dict[str, Any]]] = [
    (PATHS[0], {"model": "demo", "prompt": "a", "max_tokens": 4, "logprobs": 1, "echo": True, **_SAMPLING}),
    (PATHS[0], {"prompt": [[1, 2], [3]], "stream": True, "stream_options": {"include_usage": True}}),
    (PATHS[0], {"prompt": "a", "guided_regex": "a+", "bad_words": ["b"], "truncate_prompt_tokens": 4}),
    (PATHS[1], {"messages": [{"role": "user", "content": "a"}], "response_format": _FORMAT, "max_tokens": 4}),
    (PATHS[1], {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "1"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": _SCHEMA}}], "tool_choice": "required",
        "chat_template_kwargs": {"a": 1}, "logprobs": True, "top_logprobs": 1,
    }),
    (PATHS[2], {
        "input": [
            {"role": "user", "content": "a"}, {"type": "reasoning", "content": [{"type": "text", "text": "b"}]},
            {"type": "function_call", "name": "f", "call_id": "c", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "1"},
        ],
        "text": {"format": {"type": "json_schema", "name": "a", "schema": _SCHEMA}}, "instructions": "c",
        "reasoning": {"effort": "low"}, "max_output_tokens": 4,
    }),
    (PATHS[3], {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"x": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "1"}]},
        ],
        "system": "s", "tools": [{"name": "f", "description": "d", "input_schema": _SCHEMA}], "max_tokens": 4,
        "tool_choice": {"type": "tool", "name": "f"}, "thinking": {"type": "enabled", "budget_tokens": 1},
    }),
    (PATHS[4], {"messages": [{"role": "user", "content": "a"}]}),
    (PATHS[5], {"input": ["a", "b"], "encoding_format": "base64", "dimensions": 2, "pooling": "mean"}),
    (PATHS[6], {"messages": [{"role": "user", "content": "a"}], "add_generation_prompt": True}),
    (PATHS[7], {"tokens": [1, 2]}),
]  # fmt: skip
_TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ tools | tojson }}<tool_call>"


class ServerRefused(TrirunError):
    """An answer with a status of 400 to 499."""


class _Runner:
    """A model that ends every text at once."""

    name, why_slower, max_rows, prompt_rows, lookahead, has_states = "none", "", 64, 64, 0, True

    def __init__(self, vocab_size: int, slots: int = 4, context: int = 512) -> None:
        from trirun_cli.engine.slot_cache import SlotCache

        self.vocab_size, self.slots, self.context = vocab_size, slots, context
        self.cache = SlotCache(slots, context)

    def prepare(self) -> None:
        pass

    def bind(self, *_: Any) -> None:
        pass

    def launch(self, work: Any) -> Any:
        import numpy as np

        from trirun_cli.engine.runner import Done, Outcome
        from trirun_cli.engine.sampling import Token

        end = Token(0, -0.5, ((0, -0.5), (1, -1.0)))
        return Done([
            Outcome(None, states=np.ones((len(item.tokens), 4), np.float32)) if item.states
            else Outcome(end if item.sample else None, tuple(end for _ in item.targets))
            for item in work
        ])  # fmt: skip

    def close(self) -> None:
        pass


@cache
def server(api_key: str | None = None) -> tuple[Any, asyncio.AbstractEventLoop]:
    """The ASGI application on a model of 95 tokens that ends every text at once, and the loop that it runs on."""
    from trirun_cli.engine.engine import Engine
    from trirun_cli.server.app import create_app
    from trirun_cli.server.event_bridge import EventBridge
    from trirun_cli.server.model import ServedModel
    from trirun_cli.server.pool.entry import Source
    from trirun_cli.server.pool.pool import Pool
    from trirun_cli.server.tokenizer import ServerTokenizer
    from trirun_cli.text.grammar import GrammarCompiler
    from trirun_cli.text.tokenizer import LightTokenizer

    backend = letters()
    size = backend.get_vocab_size()
    runner: Any = _Runner(size)
    engine = Engine(runner)
    tokenizer = ServerTokenizer(LightTokenizer(backend, {}), size=size, context=engine.context, chat_template=_TEMPLATE)
    grammars = GrammarCompiler(backend, size, {0})
    model = ServedModel(engine, tokenizer, frozenset({0}), {}, "as asked", grammars=grammars)
    pool = Pool([Source(["demo"], lambda: model)])
    engine.start()
    loop = asyncio.new_event_loop()
    loop.run_until_complete(_opened(pool, EventBridge(loop)))
    return create_app(pool, api_key=api_key), loop


async def _opened(pool: Any, bridge: Any) -> None:
    await pool.preload(bridge, 1)
    pool.open()


def post(path: str, body: bytes, **options: Any) -> tuple[int, bytes]:
    """(status, body) of a request to :func:`server`, whose ``options`` are given too."""
    status, _, answer = send("POST", path.encode(), [(b"content-type", b"application/json")], body, **options)
    return status, answer


def send(
    method: str, target: bytes, headers: list[tuple[bytes, bytes]], body: bytes, **options: Any
) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """(status, headers, body) of a request to :func:`server`, whose ``options`` are given too."""
    app, loop = server(**options)
    sent: list[Any] = []
    received = [{"type": "http.request", "body": body, "more_body": False}]
    path, _, query = target.partition(b"?")
    scope = {
        "type": "http", "http_version": "1.1", "method": method, "path": unquote(path.decode("ascii", "replace")),
        "raw_path": path, "scheme": "http", "query_string": query, "root_path": "", "headers": headers,
        "client": None, "server": ("test", 80), "asgi": {"version": "3.0"},
    }  # fmt: skip

    async def receive() -> Any:
        # Who has sent all of a body waits for the answer.
        return received.pop() if received else await asyncio.Future()

    async def take(message: Any) -> None:
        sent.append(message)

    loop.run_until_complete(asyncio.wait_for(app(scope, receive, take), 60))
    first, *rest = sent
    return first["status"], first["headers"], b"".join(message.get("body", b"") for message in rest)


def http(raw: bytes, folder: Path) -> None:
    """A body of /v1/completions, or ``[path, body]``: an answer, or a refusal that is one line of JSON."""
    path, body = PATHS[0], raw
    try:
        value = json.loads(raw)
        if isinstance(value, list) and len(value) == 2 and value[0] in PATHS:
            path, body = value[0], json.dumps(value[1]).encode()
    except (ValueError, TypeError, RecursionError):
        pass
    status, answer = post(path, body)
    assert status < 500, f"{status} of {path}"
    if status >= 400:
        error = json.loads(answer)["error"]
        assert error["type"], answer
        raise ServerRefused(error["message"])


KEY = "k"
HEADERS = [
    b"POST /v1/completions?a=1\nauthorization: Bearer k\ncontent-type: application/json\nx-request-id: a",
    b"GET /v1/models/demo\nx-api-key: k\naccept: text/html\norigin: http://a\naccess-control-request-method: POST",
    b"GET /metrics\ntraceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\nexpect: 100-continue",
]
_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


def headers(raw: bytes, folder: Path) -> None:
    """The head of a request as an HTTP parser passes it on, to a server with a key: without the key only what needs
    none is answered, and what the answer repeats is one line."""
    (method, _, target), *lines = (line.partition(b" ") for line in raw.split(b"\n"))
    given = [(name.lower().removesuffix(b":"), content.strip(b" \t")) for name, _, content in lines]
    known = all(_TOKEN.fullmatch(name) and not re.search(rb"[\x00-\x08\x0a-\x1f\x7f]", text) for name, text in given)
    lengths = [text for name, text in given if name == b"content-length"]
    if not (known and _TOKEN.fullmatch(method) and re.fullmatch(rb"/[!-~]*", target)) or lengths:
        raise NoInput
    status, answered_by, _ = send(method.decode(), target, given, b'{"prompt": "a"}', api_key=KEY)
    assert status < 500, f"{status} of {target!r}"
    assert all(re.fullmatch(rb"[\x20-\xff\t]*", text) for _, text in answered_by), answered_by
    keys = [text for name, text in given if name in (b"authorization", b"x-api-key")]
    open_ = target.partition(b"?")[0] in (b"/", b"/health", b"/version", b"/metrics")
    assert status != 200 or open_ or "%" in target.decode() or any(text.endswith(b"k") for text in keys), target
    if status >= 400:
        raise ServerRefused(str(status))


_USAGE = {"prompt_tokens": 1, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
ANSWERED = [
    [
        {"data": [{"id": "demo"}]}, {"choices": [{"text": "a"}]}, {"choices": [{"text": "b"}]},
        {"choices": [], "usage": _USAGE},
    ],
    [{"data": [{"id": "demo"}]}, {"error": {"message": "a"}}],
]  # fmt: skip


class _Answer:
    """What a server of another program answers, for a client of aiohttp's."""

    status = 200

    def __init__(self, first: Any, lines: list[bytes]) -> None:
        self._first, self._lines = first, lines

    async def __aenter__(self) -> _Answer:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def json(self) -> Any:
        return self._first

    @property
    async def content(self) -> Any:
        for line in self._lines:
            yield line


def answered(raw: bytes, folder: Path) -> None:
    """What a server answers the client of ``trirun bench serve``: its models, and a stream of an answer, as JSON or as
    the bytes of the stream."""
    from types import SimpleNamespace

    from trirun_cli.bench.client import Client, Load

    try:
        first, *chunks = value(raw)
        lines = [b"data: " + json.dumps(chunk).encode() + b"\n" for chunk in chunks] + [b"data: [DONE]\n"]
    except (NoInput, TypeError, ValueError):
        first, lines = ANSWERED[0][0], raw.splitlines(keepends=True)
    made = _Answer(first, lines)
    client = Client("http://test")
    client._session = SimpleNamespace(get=lambda *_: made, post=lambda *_, **__: made)  # type: ignore[assignment]

    async def ask() -> Any:
        await client.find_model()
        return await client.ask(Load(["a"]), 0)

    sample = asyncio.run(ask())
    if sample.error is not None:
        raise ServerRefused(sample.error[:1000])
    assert isinstance(sample.generated_tokens, int), sample
