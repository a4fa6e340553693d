"""What scripts/fuzz.py feeds beside a model's own files: requests, what models write, and files of data."""

from __future__ import annotations

import asyncio
import json
from functools import cache, partial
from pathlib import Path
from typing import Any

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
_LETTERS = "".join(map(chr, range(33, 127)))


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
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from trirun_cli.engine.engine import Engine
    from trirun_cli.server.app import create_app
    from trirun_cli.server.event_bridge import EventBridge
    from trirun_cli.server.model import ServedModel
    from trirun_cli.server.pool.entry import Source
    from trirun_cli.server.pool.pool import Pool
    from trirun_cli.server.tokenizer import ServerTokenizer
    from trirun_cli.text.grammar import GrammarCompiler
    from trirun_cli.text.tokenizer import LightTokenizer

    backend = Tokenizer(models.BPE({"<end>": 0, **{c: i for i, c in enumerate(_LETTERS, 1)}}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    size = len(_LETTERS) + 1
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
    app, loop = server(**options)
    sent: list[Any] = []
    received = [{"type": "http.request", "body": body, "more_body": False}]
    scope = {
        "type": "http", "http_version": "1.1", "method": "POST", "path": path, "raw_path": path.encode(),
        "scheme": "http", "query_string": b"", "root_path": "", "headers": [(b"content-type", b"application/json")],
        "client": None, "server": ("test", 80), "asgi": {"version": "3.0"},
    }  # fmt: skip

    async def receive() -> Any:
        # Who has sent all of a body waits for the answer.
        return received.pop() if received else await asyncio.Future()

    async def send(message: Any) -> None:
        sent.append(message)

    loop.run_until_complete(asyncio.wait_for(app(scope, receive, send), 60))
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


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


def calls(raw: bytes, folder: Path) -> None:
    """What a model has written, in pieces: every parser of tool calls and of reasoning gives valid Unicode and JSON."""
    from trirun_cli.text.harmony import ChannelParser, HarmonyParser
    from trirun_cli.text.reasoning import ReasoningParser
    from trirun_cli.text.tool_parsers import HermesParser, JsonParser, MistralParser, PythonicParser

    text = raw.decode("utf-8", "replace")
    pieces = [text[at : at + 23] for at in range(0, len(text), 23)] if len(text) < 4096 else [text]
    for kind in (HermesParser, JsonParser, PythonicParser, MistralParser, HarmonyParser):
        parser, found = kind(), []
        for piece in pieces:
            found += parser.feed(piece)[1]
        found += parser.flush()[1]
        json.dumps(found, ensure_ascii=False).encode()
        for call in found:
            json.dumps(json.loads(call["function"]["arguments"]), ensure_ascii=False, allow_nan=False).encode()
    for split in (ChannelParser(), ReasoningParser(False), ReasoningParser(True)):
        told = sum(
            len(part) for piece in [*pieces, None] for part in (split.flush() if piece is None else split.feed(piece))
        )
        assert told <= len(text) + 64


def calibration(raw: bytes, folder: Path) -> None:
    """A .jsonl file of calibration texts, whose tokens are its characters."""
    from trirun_gptq.calibration import load_stream

    (folder / "text.jsonl").write_bytes(raw)
    load_stream(str(folder / "text.jsonl"), _Characters(), 0)


class _Characters:
    eos_token_id, bos_token_id, chat_template = 0, None, "of each message its content"

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def apply_chat_template(self, messages: Any, **_: Any) -> str:
        return "".join(f"{message['role']}{message['content']}" for message in messages)


def rows(raw: bytes, folder: Path, name: str = "rows.jsonl") -> None:
    """A file of a benchmark's questions, of the kind that its first row is of."""
    from trirun_cli.eval.tasks.offline import MMLU, OFFLINE_TASKS, load_rows

    (folder / name).write_bytes(raw)
    load_rows(folder / name, (*MMLU.schemas, *(schema for task in OFFLINE_TASKS.values() for schema in task.schemas)))


csv_rows = partial(rows, name="rows.csv")
ROWS = [
    {"question": "a", "choices": ["b", "c", "d", "e"], "answer": 1},
    {"query": "Question: a", "choices": ["b", "c"], "gold": 0},
    {"goal": "a", "sol1": "b", "sol2": "c", "label": 1},
    {
        "question": {"stem": "a", "choices": [{"text": "b", "label": "A"}, {"text": "c", "label": "B"}]},
        "answerKey": "A",
    },
    {"ctx_a": "a", "ctx_b": "", "activity_label": "b", "endings": ["c", "d", "e", "f"], "label": "3"},
    {"question": "a", "answer": "b #### 1"},
]
CSV = [b'question,A,B,C,D,answer\n"a, b",c,d,e,f,A\n', b"a,b,c,d,e,B\nf,g,h,i,j,C\n"]
TEXTS = [{"text": "a"}, {"messages": [{"role": "user", "content": "a"}]}]
CALLS = [
    b'<think>a</think>b<tool_call>{"name": "f", "arguments": {"x": [1, "\\u00e9"]}}</tool_call>',
    b'{"name": "f", "parameters": {"x": null}}; {"name": "g", "arguments": {"x": [NaN, "\\ud83d\\ude00"]}}',
    b"[f(x=1, y=[True, None, 'a']), a.g(z={'b': -1.5})]",
    b'a[TOOL_CALLS]f[CALL_ID]c[ARGS]{"x": 1}[TOOL_CALLS][{"name": "g", "arguments": {}}]',
    b"<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json"
    b'<|message|>{"x": 1}<|call|><|start|>assistant<|channel|>final<|message|>b<|return|>',
]
