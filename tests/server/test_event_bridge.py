"""Events from the engine's thread: in order, none lost, tokens in the middle of a stream a few at a time."""

import asyncio
import threading
import time

from trirun_cli.engine.request import Event, FinishReason
from trirun_cli.engine.sampling import Token
from trirun_cli.server.event_bridge import AT_ONCE, EventBridge


def token(id):
    return Event("r", (Token(id),))


END = Event("r", finish=FinishReason.STOP)


def deliveries(interval, send):
    """Seconds and events of each delivery of what ``send(sink)`` sends from another thread."""
    got = []

    async def scenario():
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def receive(event):
            got.append((loop.time() - started, event))
            if event.finish is not None:
                done.set()

        started = loop.time()
        thread = threading.Thread(target=send, args=(EventBridge(loop, interval).sink_for(receive),))
        thread.start()
        await asyncio.wait_for(done.wait(), 10)
        thread.join()

    asyncio.run(scenario())
    return got


def test_many_threads_lose_nothing_and_keep_their_order():
    for interval in (0.0, 0.01):
        got = {number: [] for number in range(4)}

        async def scenario(interval=interval, got=got):
            bridge = EventBridge(asyncio.get_running_loop(), interval)

            def send(sink):
                for id in range(500):
                    sink(token(id))
                sink(END)

            sinks = [bridge.sink_for(got[number].append) for number in got]
            threads = [threading.Thread(target=send, args=(sink,)) for sink in sinks]
            for thread in threads:
                thread.start()
            while not all(events and events[-1] is END for events in got.values()):
                await asyncio.sleep(0.001)

        asyncio.run(asyncio.wait_for(scenario(), 20))
        for events in got.values():
            assert [event.tokens[0].id for event in events[:-1]] == list(range(500))


def test_the_first_tokens_and_the_end_do_not_wait():
    def send(sink):
        sink(token(1))
        time.sleep(0.05)
        sink(token(2))
        time.sleep(0.05)
        sink(END)

    got = deliveries(5.0, send)
    # The second token waits for the end, not for the interval.
    assert [event.tokens for _, event in got] == [(Token(1),), (Token(2),), ()]
    assert got[0][0] < 0.05 and got[1][0] >= 0.1 and got[2][0] < 2


def test_tokens_in_between_come_together():
    def send(sink):
        for id in range(40):
            sink(token(id))
            time.sleep(0.005)
        sink(END)

    together = {round(seconds, 2) for seconds, _ in deliveries(0.1, send)}
    alone = {round(seconds, 2) for seconds, _ in deliveries(0.0, send)}
    # 0.2 s of tokens: the first, one or two collections, the end. A busy machine only makes them fewer.
    assert len(together) <= 6 < len(alone)


def test_a_loop_that_is_gone_does_not_hurt_the_engine():
    loop = asyncio.new_event_loop()
    sink = EventBridge(loop).sink_for(lambda event: None)
    loop.close()
    sink(token(1))
    sink(END)


def test_many_receivers_leave_turns_to_others():
    async def scenario():
        bridge, turn, served = EventBridge(asyncio.get_running_loop()), 0, {}
        sinks = [
            bridge.sink_for(lambda event, name=name: served.setdefault(name, []).append(turn)) for name in range(64)
        ]
        for sink in sinks * 2:
            sink(END)
        while len(served) < 64:
            turn += 1
            await asyncio.sleep(0)
        return list(served.values())

    served = asyncio.run(asyncio.wait_for(scenario(), 10))
    # What was there for a receiver came together.
    assert all(first == second for first, second in served)
    turns = [first for first, _ in served]
    assert max(turns.count(turn) for turn in turns) == AT_ONCE and turns == sorted(turns)
