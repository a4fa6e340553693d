"""Text from the engine: prompts in, pieces of text as they become certain, and how each ended."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..errors import InputError
from ..text.detokenizer import TextStream
from .engine import Engine
from .request import Event, FinishReason, Request, Usage
from .sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids to continue. ``id`` is unique among those that run together."""

    id: str
    ids: Sequence[int]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Completion:
    """How a prompt was continued.

    Attributes:
        text: without the stop string that may have ended it. tokens: ids, those of a stop string among them, and none
            after it.
        finish: "stop" (a stop string or an end-of-text token), "length", or "abort" when it was interrupted.
        usage: the engine's. Where a stop string ended the text, it counts what the engine wrote until it was told, too.
    """

    id: str
    text: str
    tokens: tuple[int, ...]
    finish: FinishReason
    usage: Usage


class _Writer:
    """One prompt's text on its way."""

    def __init__(self, stream: TextStream, on_text: Callable[[str, str], None], stops: bool) -> None:
        self._stream, self._on_text, self._stops = stream, on_text, stops
        self._pieces: list[str] = []
        self._tokens: list[int] = []

    def take(self, event: Event) -> bool:
        """The text of new tokens; whether a stop string has been met."""
        ids, piece = [token.id for token in event.tokens], ""
        # Where a stop string may end it, every token by itself: those after it are not part of the answer.
        for new in zip(ids) if self._stops else (ids,):
            if self._stream.stopped:
                break
            self._tokens += new
            piece += self._stream.extend(new)
        if event.finish is not None:
            piece += self._stream.flush()
        if piece:
            self._pieces.append(piece)
            self._on_text(event.request_id, piece)
        return self._stream.stopped

    def completion(self, event: Event) -> Completion:
        """Of the last event, which has both a reason and a usage."""
        assert event.finish is not None and event.usage is not None
        finish = FinishReason.STOP if self._stream.stopped else event.finish
        return Completion(event.request_id, "".join(self._pieces), tuple(self._tokens), finish, event.usage)


def complete(
    engine: Engine,
    tokenizer: Any,
    prompts: Iterable[Prompt],
    stop_ids: Collection[int],
    *,
    on_text: Callable[[str, str], None] = lambda id, piece: None,
    interrupted: Callable[[], bool] = lambda: False,
) -> Iterator[Completion]:
    """Continue prompts, many at once; completions come in the order of their ends.

    Args:
        prompts: taken as there is room for them. stop_ids: token ids that end a text.
        on_text: on_text(id, piece) of each piece of text, whole characters only, as soon as it is certain.
        interrupted: asked after every step; once it says so, everything ends with what there is.

    Raises:
        InputError: a prompt does not fit the model, or the model gives no finite logits. What the engine's runner
            raises.
    """
    ends, writers = frozenset(stop_ids), {}

    def requests() -> Iterator[Request]:
        for prompt in prompts:
            if interrupted():
                return
            stream = TextStream(tokenizer, list(prompt.ids), prompt.params.stop)
            writers[prompt.id] = _Writer(stream, on_text, stops=bool(prompt.params.stop))
            yield Request(prompt.id, tuple(prompt.ids), prompt.params, ends)

    ending = False
    for event in engine.generate(requests()):
        stopped = writers[event.request_id].take(event)
        if event.finish is FinishReason.ERROR:
            raise InputError(event.error or "the engine failed")
        if event.finish is not None:
            yield writers.pop(event.request_id).completion(event)
        elif stopped:
            engine.abort(event.request_id)
        if not ending and interrupted():
            ending = True
            for id in writers:
                engine.abort(id)


@contextmanager
def interruptions() -> Iterator[Callable[[], bool]]:
    """Within it, a first Ctrl-C only makes what it gives say True, so that a step ends as a step should; a second one
    interrupts as ever. Elsewhere than on the main thread Ctrl-C never comes, and ignored, as for a job in the
    background, it stays ignored."""
    met = False

    def meet(signum: int, frame: Any) -> None:
        nonlocal met
        met = True
        signal.signal(signal.SIGINT, before)

    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, meet)
    try:
        yield lambda: met
    finally:
        signal.signal(signal.SIGINT, before)
