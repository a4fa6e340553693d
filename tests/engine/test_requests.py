"""The engine and those who use it: aborts, failures, limits, threads, on a runner without a model."""

import threading
import time

import pytest

from tests.engine import mock_runner
from tests.engine.mock_runner import MockBurstRunner, MockRunner, continuation, request, run_all, submit
from trirun_cli.engine.engine import Engine
from trirun_cli.engine.request import EngineStopped, FinishReason, QueueFull


@pytest.mark.parametrize("lookahead", [0, 1])
def test_aborts(lookahead):
    runner = MockRunner(slots=2, lookahead=lookahead)
    engine = Engine(runner)
    running, other, waiting = (submit(engine, name, [1, 2, 3], 20) for name in "abc")
    for _ in range(3):
        engine.step()
    for name in ("a", "c", "a", "nobody"):
        engine.abort(name)
    engine.step()
    assert running.finish == waiting.finish == FinishReason.ABORT and waiting.tokens == []
    assert running.tokens == continuation([1, 2, 3], 20)[: len(running.tokens)] and len(running.tokens) >= 2
    later = submit(engine, "a", [4], 3)
    run_all(engine)
    assert other.tokens == continuation([1, 2, 3], 20) and later.tokens == continuation([4], 3)
    assert engine.stats.finished[FinishReason.ABORT] == 2


def test_a_sink_may_abort_its_own_and_other_requests():
    engine = Engine(MockRunner())
    other, mine = submit(engine, "other", [1], 20), []

    def sink(event):
        mine.append(event)
        if len(mine) == 3:
            engine.abort("mine")
            engine.abort("other")

    engine.submit(request("mine", [2], 20), sink)
    run_all(engine)
    assert [event.finish for event in mine] == [None, None, None, FinishReason.ABORT]
    assert other.finish == FinishReason.ABORT


def test_a_failing_sink_ends_its_request_and_no_other(caplog):
    engine = Engine(MockRunner())
    other = submit(engine, "other", [1], 6)

    def sink(event):
        raise OSError("gone")

    engine.submit(request("bad", [2], 6), sink)
    run_all(engine)
    assert other.tokens == continuation([1], 6) and engine.stats.finished[FinishReason.ABORT] == 1
    assert "request bad" in caplog.text


def test_the_queue_is_limited():
    engine = Engine(MockRunner(slots=1), max_waiting=1)
    first, second = submit(engine, 1, [1], 2), submit(engine, 2, [2], 2)
    with pytest.raises(QueueFull, match="2 requests are running or waiting"):
        submit(engine, 3, [3])
    with pytest.raises(ValueError, match="'2' is in the engine already"):
        Engine.submit(engine, request(2, [2]), print)
    run_all(engine)
    assert first.finish == second.finish == FinishReason.LENGTH
    assert submit(engine, 3, [3], 0) is not None


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_failing_runner_ends_every_request(lookahead):
    runner = MockRunner(slots=1, lookahead=lookahead)
    engine = Engine(runner)
    boxes = [submit(engine, i, [1], 9) for i in range(3)]
    engine.step()
    runner.failure = RuntimeError("device lost")
    with pytest.raises(RuntimeError, match="device lost"):
        run_all(engine)
    assert not engine.alive
    assert all(box.finish == FinishReason.ERROR and "device lost" in box.events[-1].error for box in boxes)
    with pytest.raises(EngineStopped, match="device lost"):
        submit(engine, 9, [1])
    engine.abort("1")
    engine.close()


@pytest.mark.parametrize("kind", [MockRunner, MockBurstRunner])
def test_logits_that_are_not_finite_end_their_request_alone(kind, monkeypatch):
    after = mock_runner.token_after
    monkeypatch.setattr(mock_runner, "token_after", lambda held: -1 if held[0] == 7 and len(held) > 3 else after(held))
    engine = Engine(kind(slots=2))
    early, late, other = submit(engine, 1, [7] * 4, 9), submit(engine, 2, [7], 9), submit(engine, 3, [8], 9)
    run_all(engine)
    for lost, count in ((early, 0), (late, 3)):
        assert lost.finish == FinishReason.ERROR and "not finite" in lost.events[-1].error
        assert len(lost.tokens) == lost.events[-1].usage.generated_tokens == count and -1 not in lost.tokens
    assert other.finish == FinishReason.LENGTH and other.tokens == continuation([8], 9) and engine.alive


def test_a_failure_on_the_engines_thread():
    runner = MockRunner()
    runner.failure = RuntimeError("device lost")
    engine = Engine(runner)
    engine.start()
    inbox = submit(engine, 1, [1])
    for _ in range(500):
        if inbox.finish:
            break
        time.sleep(0.01)
    assert inbox.finish == FinishReason.ERROR and not engine.alive
    engine.close(drain_s=5)
    assert runner.closed


def test_many_threads_submit_to_a_running_engine():
    engine, boxes = Engine(MockRunner(slots=4, pages=20, lookahead=1)), []
    engine.start()

    def client(number):
        for i in range(20):
            boxes.append((number, submit(engine, f"{number}/{i}", [number, i], 6)))
            if i % 7 == 0:
                engine.abort(f"{number}/{i}")

    threads = [threading.Thread(target=client, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    engine.close(drain_s=30)
    assert len(boxes) == 100 and all(inbox.finish is not None for _, inbox in boxes)
    done = [inbox for _, inbox in boxes if inbox.finish == FinishReason.LENGTH]
    assert len(done) >= 85
    for inbox in done:
        number, i = map(int, inbox.events[-1].request_id.split("/"))
        assert inbox.tokens == continuation([number, i], 6)
    with pytest.raises(EngineStopped, match="closed"):
        submit(engine, "late", [1])


@pytest.mark.parametrize("threaded", [False, True])
def test_closing_drains_or_aborts(threaded):
    engine = Engine(MockRunner())
    if threaded:
        engine.start()
    inbox = submit(engine, 1, [1], 20)
    engine.close(drain_s=30)
    assert inbox.tokens == continuation([1], 20)
    engine = Engine(MockRunner())
    inbox = submit(engine, 1, [1], 20)
    engine.step()
    engine.close()
    assert inbox.finish == FinishReason.ABORT


@pytest.mark.parametrize("threaded", [False, True])
def test_generate_takes_requests_as_there_is_room(threaded):
    engine, taken = Engine(MockRunner(slots=2), max_waiting=1), []
    if threaded:
        engine.start()

    def requests():
        for i in range(30):
            taken.append(i)
            yield request(i, [i, 1], 4)

    tokens = {str(i): [] for i in range(30)}
    events = engine.generate(requests())
    first = next(events)
    assert len(taken) <= 4
    for event in (first, *events):
        tokens[event.request_id] += [token.id for token in event.tokens]
    assert tokens == {str(i): continuation([i, 1], 4) for i in range(30)}


def test_leaving_generate_frees_the_slots():
    engine = Engine(MockRunner(slots=2))
    for event in engine.generate(request(i, [i], 20) for i in range(9)):
        if event.tokens:
            break
    assert engine.stats.running == engine.stats.waiting == 0
    assert {e.request_id: e.finish for e in engine.generate([request(0, [7], 1)])} == {"0": FinishReason.LENGTH}


def test_rows_for_every_slot_are_needed():
    with pytest.raises(ValueError, match="2 rows per step for 4 slots"):
        Engine(MockRunner(slots=4, max_rows=2))
