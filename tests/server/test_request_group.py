"""Request groups without HTTP: consumers of any speed get everything, and what is not wanted is cancelled."""

import asyncio

import pytest

from trirun_cli.engine.request import Event, FinishReason, Request
from trirun_cli.engine.sampling import SamplingParams, Token
from trirun_cli.server.errors import ApiError
from trirun_cli.server.event_bridge import EventBridge
from trirun_cli.server.operations.metrics import Metrics
from trirun_cli.server.request_group import RequestGroup
from trirun_cli.text.detokenizer import Detokenizer


def of_one_model():
    metrics = Metrics()
    metrics.add("m", lambda: None)
    return metrics.of("m")


class Engine:
    """Keeps what it is given; the test plays the engine."""

    def __init__(self):
        self.sinks, self.aborted = {}, []

    def submit(self, request, sink):
        self.sinks[request.id] = sink

    def abort(self, request_id):
        self.aborted.append(request_id)


@pytest.fixture
def play(tokenizer):
    """Run ``scenario(group, engine)`` on a started group of two choices, "a" and "b"."""

    def run(scenario, stop=()):
        async def main():
            engine = Engine()
            group = RequestGroup(engine, EventBridge(asyncio.get_running_loop()), of_one_model(), 0.0)
            requests = [Request(name, (1,), SamplingParams(stop=stop)) for name in "ab"]
            group.start(requests, lambda request: Detokenizer(tokenizer, [1], stop))
            return await asyncio.wait_for(scenario(group, engine), 10)

        return asyncio.run(main())

    return run


def tokens(tokenizer, text):
    return tuple(Token(id) for id in tokenizer(text)["input_ids"])


async def collect(group, pause):
    texts, finishes = {0: "", 1: ""}, {}
    async for delta in group.deltas():
        texts[delta.index] += delta.text
        if delta.finish:
            assert delta.index not in finishes
            finishes[delta.index] = delta.finish
        await asyncio.sleep(pause)
    return texts, finishes


@pytest.mark.parametrize("pause", [0.0, 0.03])
def test_a_slow_consumer_loses_nothing(play, tokenizer, pause):
    async def scenario(group, engine):
        async def write():
            for token in tokens(tokenizer, " the sea was calm"):
                engine.sinks["a"](Event("a", (token,)))
                engine.sinks["b"](Event("b", (token,)))
                await asyncio.sleep(0.01)
            engine.sinks["a"](Event("a", finish=FinishReason.STOP))
            await asyncio.sleep(0.01)
            engine.sinks["b"](Event("b", tokens(tokenizer, " and"), FinishReason.LENGTH))

        writing = asyncio.ensure_future(write())
        got = await collect(group, pause)
        await writing
        return got

    texts, finishes = play(scenario)
    assert texts == {0: " the sea was calm", 1: " the sea was calm and"} and finishes == {0: "stop", 1: "length"}


def test_a_failure_comes_after_what_was_written(play, tokenizer):
    async def scenario(group, engine):
        engine.sinks["a"](Event("a", tokens(tokenizer, " the sea"), None))
        engine.sinks["a"](Event("a", finish=FinishReason.ERROR, error="gone"))
        got = []
        with pytest.raises(ApiError, match="gone"):
            async for delta in group.deltas():
                got.append(delta.text)
        group.close()
        return got, engine.aborted

    got, aborted = play(scenario)
    assert "".join(got) == " the sea" and aborted == ["b"]


def test_a_stop_string_cancels_the_request_and_drops_later_tokens(play, tokenizer):
    async def scenario(group, engine):
        for name in "ab":
            engine.sinks[name](Event(name, tokens(tokenizer, " the sea was calm")))
            engine.sinks[name](Event(name, tokens(tokenizer, " more")))
            engine.sinks[name](Event(name, finish=FinishReason.ABORT))
        return await collect(group, 0), engine.aborted

    (texts, finishes), aborted = play(scenario, stop=("was",))
    assert texts == {0: " the sea ", 1: " the sea "} and finishes == {0: "stop", 1: "stop"} and aborted == ["a", "b"]


def test_tokens_that_came_with_those_of_a_stop_string_are_not_part_of_the_answer(play, tokenizer):
    wanted = tokens(tokenizer, " the sea was")

    async def scenario(group, engine):
        engine.sinks["a"](Event("a", tokens(tokenizer, " the sea was calm and the ship lay still")))
        engine.sinks["b"](Event("b", tokens(tokenizer, " the sea was calm"), FinishReason.LENGTH))
        deltas = await group.whole()
        return [(delta.text, tuple(delta.tokens)) for delta in deltas], [choice.generated for choice in group.choices]

    answers, counts = play(scenario, stop=("was",))
    assert answers == [(" the sea ", wanted)] * 2 and counts == [len(wanted)] * 2


def test_closing_cancels_what_is_open_once(play, tokenizer):
    async def scenario(group, engine):
        engine.sinks["a"](Event("a", tokens(tokenizer, " x"), FinishReason.LENGTH))
        await asyncio.sleep(0.01)
        group.close()
        group.close()
        engine.sinks["b"](Event("b", tokens(tokenizer, " late")))
        await asyncio.sleep(0.01)
        return engine.aborted

    assert play(scenario) == ["b"]


def test_tokens_that_cannot_be_made_text_end_the_request_and_no_other(tokenizer):
    class Broken:
        def decode(self, ids, skip_special_tokens=False):
            if 999 in ids:
                raise TypeError("no token")
            return "x" * len(ids)

    async def main():
        engine, bridge = Engine(), EventBridge(asyncio.get_running_loop())
        groups = [RequestGroup(engine, bridge, of_one_model(), 0.0) for _ in range(2)]
        for group, name in zip(groups, "ab", strict=True):
            group.start([Request(name, (1,), SamplingParams())], lambda request: Detokenizer(Broken(), [1]))
        for name, token in (("a", 999), ("b", 5)):
            engine.sinks[name](Event(name, (Token(token),), FinishReason.LENGTH, usage=None))
        with pytest.raises(ApiError) as caught:
            await asyncio.wait_for(groups[0].whole(), 10)
        (delta,) = await asyncio.wait_for(groups[1].whole(), 10)
        return caught.value.status, engine.aborted, delta.finish

    assert asyncio.run(main()) == (500, ["a"], "length")
