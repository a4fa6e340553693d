"""A runner without a model: its tokens are a function of those before, which it reads from its cache as a device would,
so that a page given to the wrong slot, or a step at the wrong position, gives wrong tokens."""

import numpy as np

from trirun_cli.engine.paged_cache import PagedCache
from trirun_cli.engine.request import Request
from trirun_cli.engine.runner import Outcome
from trirun_cli.engine.sampling import SamplingParams, Token
from trirun_cli.engine.slot_cache import SlotCache

VOCAB = 50


def token_after(tokens):
    """The mock model."""
    value = len(tokens)
    for token in tokens:
        value = (value * 31 + token + 1) % 100_003
    return value % VOCAB


def continuation(prompt, most, stop_ids=()):
    """What a request gets: its tokens, without the stop id that may end them."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + most:
        token = token_after(tokens)
        if token in stop_ids:
            break
        tokens.append(token)
    return tokens[len(prompt) :]


class MockRunner:
    """``pages``: a paged cache of that many pages of 4 positions; None: a region per slot, which can be copied.
    ``windowed_pages``: of a layer that sees ``window`` positions, which are looked at and answer nothing."""

    name, why_slower, vocab_size, has_states = "mock", "", VOCAB, True

    def __init__(self, slots=4, context=32, max_rows=8, lookahead=0, pages=None, **windows):
        self.slots, self.context, self.max_rows, self.lookahead = slots, context, max_rows, lookahead
        self.prompt_rows = max_rows
        self.paged = pages is not None
        self.memory = {}
        self.cache = (
            PagedCache(slots, pages, context, page_size=4, **windows)
            if self.paged
            else SlotCache(slots, context, copy=self.copy)
        )
        self.window, self.blocks = windows.get("window"), -(-context // 4)
        self.last, self.seen = [None] * slots, [None] * slots
        self.steps, self.in_flight, self.bound, self.closed = [], [], [], False
        self.failure = None

    def copy(self, source, target, length):
        for position in range(length):
            self.memory[target, position] = self.memory[source, position]

    def prepare(self):
        self.prepared = True

    def bind(self, slot, request, generated):
        self.bound.append((request.id, slot, len(generated)))
        assert request.prompt is not None and len(generated) <= request.params.max_tokens

    def place(self, slot, position):
        if not self.paged:
            return slot, position
        page = int(self.cache.tables[slot, position // 4])
        assert page > 0
        return page, position % 4

    def windowed(self, slot, position):
        page = int(self.cache.tables[slot, self.blocks + position // 4])
        assert page > 0
        return "windowed", page, position % 4

    def launch(self, work):
        if self.failure is not None:
            raise self.failure
        assert work and len({item.slot for item in work}) == len(work)
        assert sum(item.rows for item in work) <= self.max_rows
        assert len(self.in_flight) <= self.lookahead
        outcomes = []
        for slot, position, tokens, sample, targets, states in work:
            row = position
            for token in [self.last[slot]] if tokens is None else tokens:
                assert 0 <= token < VOCAB and row < self.context
                self.memory[self.place(slot, row)] = token
                if self.window:
                    self.memory[self.windowed(slot, row)] = token
                row += 1
            if self.window:
                # What the first of these rows sees, and all after it.
                for at in range(max(position + 1 - self.window, 0), row):
                    assert self.memory[self.windowed(slot, at)] == self.memory[self.place(slot, at)]
            held = [self.memory[self.place(slot, at)] for at in range(row)]
            token = None
            if sample:
                self.last[slot] = token_after(held)
                token = Token(self.last[slot])
            prompt = tuple(
                Token(target, logprob=float(token_after(held[: position + i + 1]))) for i, target in enumerate(targets)
            )
            # A token's state is what was before it and itself.
            found = np.array([[sum(held[: at + 1]), held[at]] for at in range(position, row)], np.float32)
            outcomes.append(Outcome(token, prompt, states=found if states else None))
        self.steps.append(list(work))
        self.in_flight.append(outcomes)
        return MockPending(self, outcomes)

    def close(self):
        self.closed = True


class MockBurstRunner(MockRunner):
    """Takes up to four steps at once, at times fewer than it may."""

    def __init__(self, **options):
        super().__init__(**options)
        self.bursts, self.stop_ids = [], {}

    def bind(self, slot, request, generated):
        super().bind(slot, request, generated)
        self.stop_ids[slot] = () if request.params.ignore_stop_ids else request.stop_ids

    def burst(self, slots, seconds):
        self.burst_s = seconds
        return 1 + len(self.steps) % 4

    def launch_burst(self, work, steps):
        assert steps > 1 and all(item.tokens is None and item.sample for item in work)
        chosen = [[] for _ in work]
        for step in range(steps - len(self.steps) % 2):
            outcomes = self.launch([item._replace(position=item.position + step) for item in work]).collect()
            for tokens, outcome in zip(chosen, outcomes, strict=True):
                tokens.append(outcome.token)
            if any(tokens[-1].id in (-1, *self.stop_ids[item.slot]) for tokens, item in zip(chosen, work, strict=True)):
                break
        self.bursts.append(step + 1)
        outcomes = [Outcome(tokens[0], (), tuple(tokens[1:])) for tokens in chosen]
        self.in_flight.append(outcomes)
        return MockPending(self, outcomes)


class MockPending:
    def __init__(self, runner, outcomes):
        self.runner, self.outcomes = runner, outcomes

    def collect(self):
        assert self.runner.in_flight.pop(0) is self.outcomes, "steps are collected in the order of their launch"
        return self.outcomes


def request(id, prompt, most=5, stop_ids=(), **params):
    return Request(str(id), tuple(prompt), SamplingParams(max_tokens=most, **params), frozenset(stop_ids))


class Inbox:
    """A sink that keeps what it is told."""

    def __init__(self):
        self.events = []

    def __call__(self, event):
        assert not self.events or self.events[-1].finish is None, "nothing comes after the last event"
        self.events.append(event)

    @property
    def tokens(self):
        return [token.id for event in self.events for token in event.tokens]

    @property
    def finish(self):
        return self.events[-1].finish if self.events else None


def submit(engine, *args, **params):
    inbox = Inbox()
    engine.submit(request(*args, **params), inbox)
    return inbox


def run_all(engine):
    for _ in range(10_000):
        if not engine.step():
            return
    raise AssertionError("the engine does not come to an end")
