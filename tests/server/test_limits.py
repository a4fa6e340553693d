"""What one request may cost the others: sizes, times, and the thread that everything waits for."""

import asyncio
import re
import threading
from pathlib import Path

import pytest

from trirun_cli.engine.constraint import Grammar
from trirun_cli.errors import UsageError
from trirun_cli.server import tokenizer as server_tokenizer
from trirun_cli.server.errors import ApiError
from trirun_cli.server.http.json_weight import is_too_heavy
from trirun_cli.server.replies import CompletionReply
from trirun_cli.server.thread import Preparation
from trirun_cli.text.grammar import GrammarCompiler

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HELLO}),
        (COMPLETIONS, {"prompt": ["word " * 20] * 100}),
        (COMPLETIONS, {"prompt": "x", "guided_json": SCHEMA}),
        (CHAT, {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}),
        ("/tokenize", {"prompt": "word " * 1000}),
        ("/detokenize", {"tokens": [5] * 5000}),
    ],
)
def test_templates_tokens_and_grammars_leave_the_event_loop(site, monkeypatch, path, body):
    """On its thread, none of what takes time with a request's size is called."""
    seen = []

    def watched(owner, name):
        real = getattr(owner, name)

        def call(*args, **kwargs):
            # A few characters take no time.
            if args[1:] != ("x", True, "prompt"):
                seen.append((name, threading.current_thread()))
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    watched(server_tokenizer.ServerTokenizer, "_ids")
    watched(server_tokenizer.ServerTokenizer, "text_of")
    watched(server_tokenizer.LightTemplate, "__call__")
    watched(GrammarCompiler, "compile")
    watched(Grammar, "of_schema")

    async def scenario():
        async with site(context=200) as demo:
            assert (await demo.post(path, body))[0] == 200

    asyncio.run(scenario())
    assert seen and not [name for name, thread in seen if thread is threading.current_thread()]


def test_preparation_ends_in_time_and_says_so():
    async def scenario():
        stop = threading.Event()
        with pytest.raises(ApiError, match=r"the grammar: takes more than 0\.05 s") as caught:
            await Preparation(seconds=0.05).run(stop.wait, "the grammar")
        stop.set()
        assert (caught.value.status, caught.value.code) == (400, "too_complex")
        assert await Preparation().run(lambda: 5, "x") == 5
        with pytest.raises(TimeoutError, match="its own"):
            await Preparation().run(lambda: (_ for _ in ()).throw(TimeoutError("its own")), "x")

    asyncio.run(scenario())


def test_few_are_prepared_at_once():
    async def scenario():
        running, most, lock = 0, 0, threading.Lock()
        ready = threading.Barrier(2)

        def work():
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)
            ready.wait(10)
            with lock:
                running -= 1

        preparation = Preparation(threads=2)
        await asyncio.gather(*(preparation.run(work, "x") for _ in range(8)))
        assert most == 2

    asyncio.run(scenario())


def test_a_template_that_takes_too_long_is_one_line(site, monkeypatch):
    monkeypatch.setattr(server_tokenizer, "_TEMPLATE_S", 0.05)
    slow = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"

    async def scenario():
        async with site(template=slow) as demo:
            status, answer = await demo.post(CHAT, {"messages": HELLO})
            assert status == 400 and "takes more than 0.05 s" in answer["error"]["message"]
            assert (await demo.post(COMPLETIONS, {"prompt": "x"}))[0] == 200

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("body", "taken"),
    [
        ({"n": 4, "max_tokens": 20}, True),
        ({"n": 5, "max_tokens": 20}, False),
        ({"prompt": ["x"] * 5, "max_tokens": 20}, False),
        ({"max_tokens": 50}, True),
    ],
)
def test_choices_times_tokens_are_limited(site, monkeypatch, check_error, body, taken):
    """Of several choices; one alone may fill the context."""
    monkeypatch.setattr("trirun_cli.server.choices.MOST_TOKENS", 80 if "n" in body or "prompt" in body else 10)

    async def scenario():
        async with site() as demo:
            answer = await demo.client.post(COMPLETIONS, json={"prompt": "x"} | body)
            if taken:
                assert answer.status_code == 200
            else:
                assert "100 tokens in all, at most 80" in check_error(answer, 400, "max_tokens")["message"]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("body", "heavy"),
    [
        (b"[" + b"5," * 390_000 + b"5]", False),
        (b"[" + b"5," * 410_000 + b"5]", True),
        (b"{" + b'"a":0,' * 90_000 + b"}", True),
        (b"[" + b"[]," * 140_000 + b"[]]", True),
        (b'["' + b"a, b: [c] {d} " * 100_000 + b'"]', False),
        (b'["' + b'\\"a\\": [1, 2, {\\"b\\\\\\": 3}] ' * 20_000 + b'"]', False),
        (b'["\\\\",' + b"5," * 410_000 + b"5]", True),
    ],
    ids=["ids", "more ids", "names", "lists", "a text of commas", "a text of JSON", "a backslash at the end of a text"],
)
def test_values_are_counted_outside_of_texts(body, heavy):
    assert is_too_heavy(body) == heavy


def test_a_body_of_too_many_values_is_refused(site, check_error):
    async def scenario():
        async with site() as demo:
            answer = await demo.client.post(COMPLETIONS, json={"prompt": [5] * 500_000})
            assert "too many values" in check_error(answer, 413)["message"]

    asyncio.run(scenario())


def test_a_long_answer_is_written_off_the_event_loop_and_is_the_same(site, monkeypatch):
    threads = []
    part = CompletionReply._part
    monkeypatch.setattr(
        CompletionReply, "_part", lambda *args: (threads.append(threading.current_thread()), part(*args))[1]
    )

    async def scenario():
        async with site(lambda request: [5] * 600, context=700) as demo:
            body = {"prompt": "x", "max_tokens": 600, "logprobs": 1}
            _, whole = await demo.post(COMPLETIONS, body)
            parts = await demo.stream(COMPLETIONS, body)
            joined = [text for each in parts for text in each["choices"][0]["logprobs"]["tokens"]]
            assert whole["choices"][0]["logprobs"]["tokens"] == joined and len(joined) == 600

    asyncio.run(scenario())
    assert threads[0] is not threading.current_thread() and threads[-1] is threading.current_thread()


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (Grammar("grammar", "start: A\nA: " + " & ".join(f"/.*a.{{{i}}}.*/" for i in range(12))), "11 operators"),
        (Grammar("grammar", 'start: A\nA: ~/a/ & "b & c & d & e & f & g & h & i & j"'), None),
        (Grammar("regex", "a" * 200_001), "at most 200000"),
    ],
)
def test_what_would_take_for_ever_to_compile_is_refused(tokenizer, grammar, words):
    compiler = GrammarCompiler(tokenizer.backend_tokenizer, len(tokenizer), {0})
    if words is None:
        compiler.compile(grammar)
    else:
        with pytest.raises(UsageError, match=words):
            compiler.compile(grammar)


def test_a_schema_of_too_many_parts_is_refused():
    Grammar.of_schema({"enum": list(range(60_000))})
    with pytest.raises(UsageError, match="more than 50000 parts"):
        Grammar.of_schema({"anyOf": [{"const": i} for i in range(50_000)]})


@pytest.mark.parametrize("steps", [[2_147_483_648], [9_973, 9_967], [0.12345678]])
def test_a_schema_of_too_many_remainders_is_refused(steps):
    with pytest.raises(UsageError, match="at most 10000 are taken"):
        Grammar.of_schema({"allOf": [{"type": "number", "multipleOf": step} for step in steps]})


def test_multiples_in_use_are_taken(tokenizer):
    compiler = GrammarCompiler(tokenizer.backend_tokenizer, len(tokenizer), {0})
    steps = [0.01, 0.0025, 5, 15, 60, 1024, 400_000_000, 1]
    for alone in steps:
        compiler.compile(Grammar.of_schema({"type": "number", "multipleOf": alone}))
    Grammar.of_schema({"properties": {"multipleOf": {"const": True}, "x": {"multipleOf": True}}})


def test_grammars_that_are_kept_take_little_memory(tokenizer):
    def resident():
        return int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1]) >> 10

    compiler = GrammarCompiler(tokenizer.backend_tokenizer, len(tokenizer), {0})
    compiler.compile(Grammar("regex", "a"))
    before = resident()
    for count in range(990, 996):
        compiler.compile(Grammar.of_schema({"type": "string", "pattern": f"^(a{{1000}}){{{count}}}$"}))
    # A tenth of what one took.
    assert resident() - before < 6 * 17
