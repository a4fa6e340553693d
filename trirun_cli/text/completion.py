"""Text from the engine: prompts in, pieces of text as they become certain, and how each ended."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..engine.constraint import Constraint
from ..engine.engine import Engine
from ..engine.request import Event, FinishReason, Request, Usage
from ..engine.sampling import SamplingParams, Token
from ..errors import InputError
from .detokenizer import Detokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids to continue. ``id`` is unique among those that run together; ``constraint`` begins what says which
    tokens may come."""

    id: str
    ids: Sequence[int]
    params: SamplingParams
    constraint: Callable[[], Constraint] | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """How a prompt was continued.

    Attributes:
        text: without the stop string that may have ended it.
        token_ids: of the text, those of a stop string among them, and none after it.
        finish_reason: "stop" (a stop string or an end-of-text token), "length", or "abort" when it was interrupted.
        prompt_token_ids: what it continues.
        usage: the engine's. Where a stop string ended the text, it counts what the engine wrote until it was told, too.
        logprobs: where ``params.logprobs`` asks for them, one :class:`~..engine.sampling.Token` for each of
            ``token_ids``: its log-probability in nats and the likeliest alternatives.
        prompt_logprobs: where ``params.prompt_logprobs`` asks for them, the same of ``prompt_token_ids``; the first one
            has no probability.
        id: the prompt's.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_token_ids: tuple[int, ...]
    usage: Usage
    logprobs: tuple[Token, ...] | None = None
    prompt_logprobs: tuple[Token, ...] | None = None
    id: str = ""


class _Writer:
    """One prompt's text on its way."""

    def __init__(self, tokenizer: Any, prompt: Prompt, on_text: Callable[[str, str], None]) -> None:
        self._prompt, self._on_text = prompt, on_text
        params = prompt.params
        self._detokenizer = Detokenizer(tokenizer, prompt.ids, params.stop, min_tokens=params.min_tokens)
        self._pieces: list[str] = []
        self._tokens: list[Token] = []
        self._scores: tuple[Token, ...] | None = None

    def take(self, event: Event) -> bool:
        """The text of new tokens; whether a stop string has been met."""
        tokens, detokenizer = event.tokens, self._detokenizer
        piece, count = detokenizer.take([token.id for token in tokens], last=event.finish is not None)
        self._tokens += tokens if count == len(tokens) else tokens[:count]
        if event.prompt_logprobs is not None:
            self._scores = event.prompt_logprobs
        if piece:
            self._pieces.append(piece)
            self._on_text(event.request_id, piece)
        return detokenizer.stopped

    def completion(self, event: Event) -> Completion:
        """Of the last event, which has both a reason and a usage."""
        assert event.finish is not None and event.usage is not None
        tokens, params = tuple(self._tokens), self._prompt.params
        return Completion(
            text="".join(self._pieces),
            token_ids=tuple(token.id for token in tokens),
            finish_reason=FinishReason.STOP if self._detokenizer.stopped else event.finish,
            prompt_token_ids=tuple(self._prompt.ids),
            usage=event.usage,
            logprobs=None if params.logprobs is None else tokens,
            prompt_logprobs=self._scores,
            id=event.request_id,
        )


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
            writers[prompt.id] = _Writer(tokenizer, prompt, on_text)
            yield Request(prompt.id, tuple(prompt.ids), prompt.params, ends, prompt.constraint)

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
