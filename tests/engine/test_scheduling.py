"""The engine's loop on a runner without a model: who runs when, and who gets what."""

import random

import pytest

from tests.engine.mock_runner import VOCAB, MockBurstRunner, MockRunner, continuation, run_all, submit, token_after
from trirun_cli.engine.engine import Engine
from trirun_cli.engine.request import FinishReason

RUNNERS = {
    "slots": {},
    "pages": {"pages": 40},
    "few pages": {"pages": 10},
    "pages, looking ahead": {"pages": 40, "lookahead": 1},
    "few pages, looking ahead": {"pages": 10, "lookahead": 1},
    "windows": {"pages": 40, "window": 6, "windowed_pages": 25, "lookahead": 1},
    "few pages of windows": {"pages": 40, "window": 6, "windowed_pages": 7, "lookahead": 1},
    "slots, looking ahead": {"lookahead": 1},
    "slots, in bursts": {"kind": MockBurstRunner},
    "few pages, in bursts": {"kind": MockBurstRunner, "pages": 10},
}


@pytest.mark.parametrize("name", RUNNERS)
def test_everyone_gets_their_own_continuation(name):
    rng, options = random.Random(1), dict(RUNNERS[name])
    runner = options.pop("kind", MockRunner)(**options)
    engine, expected = Engine(runner), {}
    shared = [rng.randrange(VOCAB) for _ in range(12)]
    for i in range(150):
        prompt = shared[: rng.randrange(13)] + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 14))]
        most, stop_ids = rng.randrange(20), [rng.randrange(VOCAB) for _ in range(2)]
        inbox = submit(engine, i, prompt, most, stop_ids)
        expected[i] = inbox, continuation(prompt, min(most, 32 - len(prompt)), stop_ids)
        for _ in range(rng.randrange(4)):
            engine.step()
        if rng.random() < 0.1:
            engine.abort(str(rng.randrange(max(i - 8, 0), i + 1)))
    run_all(engine)
    for inbox, tokens in expected.values():
        aborted = inbox.finish == FinishReason.ABORT
        assert inbox.tokens == (tokens[: len(inbox.tokens)] if aborted else tokens)
        usage = inbox.events[-1].usage
        assert usage.generated_tokens == len(inbox.tokens)
        assert 0 <= usage.queued_s <= usage.first_token_s <= usage.total_s
    stats = engine.stats
    assert stats.running == stats.waiting == stats.cache_usage == 0 and stats.reused_tokens > 0
    assert sum(stats.finished.values()) == 150 and 0 < stats.finished[FinishReason.ABORT] < 15
    assert stats.generated_tokens == sum(len(inbox.tokens) for inbox, _ in expected.values())
    assert (stats.preemptions > 0) == ("few" in name)
    assert "bursts" not in name or max(runner.bursts) > 1


def test_a_burst_ends_with_the_first_to_end():
    runner = MockBurstRunner(slots=2)
    engine = Engine(runner)
    short, long, waiting = submit(engine, "short", [1], 6), submit(engine, "long", [2], 25), submit(engine, "w", [3], 2)
    while not short.finish:
        engine.step()
    assert len(runner.steps) == 6 and max(runner.bursts) > 1 and not waiting.tokens
    run_all(engine)
    assert len(runner.steps) == 25
    for inbox, prompt, most in ((short, [1], 6), (long, [2], 25), (waiting, [3], 2)):
        assert inbox.tokens == continuation(prompt, most)


def test_bursts_are_shorter_where_others_may_come():
    seconds = []
    for threaded in (False, True):
        runner = MockBurstRunner(slots=2)
        engine = Engine(runner)
        if threaded:
            engine.start()
        inbox = submit(engine, "a", [1], 6)
        if not threaded:
            run_all(engine)
        engine.close(drain_s=10)
        assert inbox.tokens == continuation([1], 6)
        seconds.append(runner.burst_s)
    assert seconds[0] > seconds[1] > 0


@pytest.mark.parametrize("lookahead", [0, 1])
def test_why_requests_end(lookahead):
    engine = Engine(MockRunner(lookahead=lookahead))
    first = token_after([1, 2])
    inbox, other = submit(engine, "stop", [1, 2], 9, [first]), submit(engine, "go", [3], 3)
    ignoring = submit(engine, "ignore", [1, 2], 3, [first], ignore_stop_ids=True)
    none, long = submit(engine, "none", [1], 0), submit(engine, "long", [5] * 30, 9)
    full = submit(engine, "full", [5] * 32, 9)
    run_all(engine)
    assert inbox.tokens == [] and inbox.finish == FinishReason.STOP
    assert other.tokens == continuation([3], 3) and other.finish == FinishReason.LENGTH
    assert ignoring.tokens == continuation([1, 2], 3) and ignoring.tokens[0] == first
    assert none.tokens == full.tokens == [] and none.finish == full.finish == FinishReason.LENGTH
    assert long.tokens == continuation([5] * 30, 2) and long.finish == FinishReason.LENGTH


def test_a_prompt_is_run_in_chunks_beside_those_who_decode():
    runner = MockRunner(slots=3, max_rows=6)
    engine = Engine(runner)
    submit(engine, "a", [1], 20)
    submit(engine, "b", [2], 20)
    engine.step()
    long = submit(engine, "long", range(20), 4)
    submit(engine, "last", [3], 1)
    run_all(engine)
    shares = [[(item.slot, item.rows) for item in step] for step in runner.steps[1:6]]
    assert shares == [[(0, 1), (1, 1), (2, 4)]] * 5
    assert [item.sample for step in runner.steps[1:6] for item in step if item.slot == 2] == [False] * 4 + [True]
    assert long.tokens == continuation(range(20), 4)


def test_a_budget_is_shared_first_come_first_served():
    runner = MockRunner(slots=4, max_rows=8)
    engine = Engine(runner)
    for i in range(4):
        submit(engine, i, [i] * 5, 3)
    run_all(engine)
    assert [(item.slot, item.rows) for item in runner.steps[0]] == [(0, 5), (1, 3)]
    # One row decodes, two finish the second prompt, five are left for the third.
    assert [(item.slot, item.rows) for item in runner.steps[1]] == [(0, 1), (1, 2), (2, 5)]


def test_looking_ahead_one_step_is_always_in_flight():
    runner = MockRunner(lookahead=1)
    engine = Engine(runner)
    inbox = submit(engine, "a", [1, 2], 4)
    counts = []
    while engine.step():
        counts.append((len(runner.in_flight), len(inbox.tokens)))
    assert counts == [(1, 0), (1, 1), (1, 2), (1, 3)] and inbox.tokens == continuation([1, 2], 4)
    # Nothing is launched past max_tokens; past a stop id one step is.
    assert len(runner.steps) == 4
    stop = continuation([9], 3)[2]
    inbox = submit(engine, "b", [9], 30, [stop])
    run_all(engine)
    assert inbox.tokens == continuation([9], 2) and len(runner.steps) == 4 + 4


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_freed_slot_is_used_at_once(lookahead):
    runner = MockRunner(slots=1, lookahead=lookahead)
    engine = Engine(runner)
    boxes = [submit(engine, i, [i, i + 1], 3) for i in range(5)]
    run_all(engine)
    assert [box.tokens for box in boxes] == [continuation([i, i + 1], 3) for i in range(5)]
    assert len(runner.steps) == 15 or lookahead


@pytest.mark.parametrize("name", RUNNERS)
def test_prompt_scores(name):
    rng, options = random.Random(3), dict(RUNNERS[name])
    engine = Engine(options.pop("kind", MockRunner)(**options))
    boxes = []
    for i in range(40):
        prompt = [rng.randrange(3) for _ in range(rng.randrange(1, 25))]
        boxes.append((prompt, submit(engine, i, prompt, most := rng.randrange(6), prompt_logprobs=0), most))
        engine.step()
    run_all(engine)
    for prompt, inbox, most in boxes:
        (event,) = (event for event in inbox.events if event.prompt_logprobs is not None)
        assert inbox.events[0] is event
        assert [token.id for token in event.prompt_logprobs] == prompt
        expected = [None] + [float(token_after(prompt[:i])) for i in range(1, len(prompt))]
        assert [token.logprob for token in event.prompt_logprobs] == expected
        assert inbox.tokens == continuation(prompt, most)


def test_the_youngest_is_preempted_and_comes_back_first():
    runner = MockRunner(slots=4, pages=10, context=32)
    engine = Engine(runner)
    boxes = [submit(engine, i, [i + 1] * 7, 20) for i in range(4)]
    run_all(engine)
    assert [box.tokens for box in boxes] == [continuation([i + 1] * 7, 20) for i in range(4)]
    aside = [(id, done) for id, _, done in runner.bound if done]
    assert engine.stats.preemptions == len(aside) > 0 and "0" not in {id for id, _ in aside}
    # Tokens are told once, and the prompt counts once.
    assert engine.stats.prompt_tokens == 28


def test_a_long_prompt_takes_few_rows_of_steps_in_which_others_decode():
    runner = MockRunner(max_rows=8)
    runner.prompt_rows = 2
    engine = Engine(runner)
    reader, alone = submit(engine, 0, [1], 12), len(runner.steps)
    engine.step()
    prompt = submit(engine, 1, list(range(20)), 4)
    run_all(engine)
    assert reader.tokens == continuation([1], 12) and prompt.tokens == continuation(list(range(20)), 4)
    rows = [[item.rows for item in step if item.tokens is not None] for step in runner.steps[alone + 1 :]]
    assert rows[:10] == [[2]] * 10
    lonely = MockRunner(max_rows=8)
    lonely.prompt_rows = 2
    engine = Engine(lonely)
    submit(engine, 0, list(range(20)), 2)
    run_all(engine)
    assert [step[0].rows for step in lonely.steps[:3]] == [8, 8, 4]
