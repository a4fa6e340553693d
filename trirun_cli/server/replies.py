"""The documents of the two completion endpoints, whole and in chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..engine.sampling import Token
from .request_group import Choice, Delta, Job
from .tokenizer import Offsets, Vocabulary
from .tools import ToolParser

# JSON has no −∞; this is what OpenAI and vLLM write for it.
_IMPOSSIBLE = -9999.0


class Reply:
    """What both kinds of answer have in common.

    Args:
        model: the name under which the model was asked for. vocabulary: for the text of single tokens.
        logprobs: tokens are shown with their log-probabilities. token_ids: tokens are shown as ids too.
        usage: a stream ends with its usage, which is null in every chunk before.
    """

    prefix, object, chunk_object = "", "", ""

    def __init__(
        self, model: str, vocabulary: Vocabulary, *, logprobs: bool, token_ids: bool, usage: bool = False
    ) -> None:
        self._vocabulary, self._logprobs, self._token_ids = vocabulary, logprobs, token_ids
        self.with_usage = usage
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def opening(self, job: Job) -> Iterator[dict[str, Any]]:
        """Chunks before the first token."""
        return iter(())

    def chunk(self, delta: Delta) -> dict[str, Any] | None:
        """One chunk of a stream; None where there is nothing to show."""
        if not self._shows(delta):
            return None
        return self._chunk({"index": delta.index, **self._part(delta), "finish_reason": delta.finish})

    def usage_chunk(self, job: Job) -> dict[str, Any]:
        """The chunk that ends a stream with its usage."""
        return {**self._head, "object": self.chunk_object, "choices": [], "usage": usage(job.choices)}

    def whole(self, job: Job, deltas: Sequence[Delta]) -> dict[str, Any]:
        """The answer that is not streamed."""
        choices = [{"index": d.index, **self._part(d), "finish_reason": d.finish} for d in deltas]
        return {**self._head, "object": self.object, "choices": choices, "usage": usage(job.choices)}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        document = {**self._head, "object": self.chunk_object, "choices": [choice]}
        return document | {"usage": None} if self.with_usage else document

    def _shows(self, delta: Delta) -> bool:
        seen = self._logprobs or self._token_ids
        return bool(delta.text or delta.finish or (seen and (delta.tokens or delta.scores)))

    def _part(self, delta: Delta) -> dict[str, Any]:
        raise NotImplementedError

    def _ids(self, delta: Delta) -> dict[str, Any]:
        return {"token_ids": [token.id for token in delta.tokens]} if self._token_ids else {}


class CompletionReply(Reply):
    """POST /v1/completions.

    Args:
        echoes: the text of each choice's prompt, which comes before its own; None without ``echo``.
    """

    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, *args: Any, echoes: Sequence[str] | None, **options: Any) -> None:
        super().__init__(*args, **options)
        self._echoes = dict(enumerate(echoes or ()))
        self._offsets: dict[int, Offsets] = {}
        self._echoing = echoes is not None

    def _shows(self, delta: Delta) -> bool:
        # A choice's echo goes out with its first delta, whatever else that brings.
        return delta.index in self._echoes or super()._shows(delta)

    def _part(self, delta: Delta) -> dict[str, Any]:
        echo = self._echoes.pop(delta.index, "")
        scores = self._scores(delta, echo) if self._logprobs else None
        return {"text": echo + delta.text, "logprobs": scores, **self._ids(delta)}

    def _scores(self, delta: Delta, echo: str) -> dict[str, Any]:
        offsets = self._offsets.setdefault(delta.index, Offsets(self._vocabulary))
        prompt = delta.scores if self._echoing else ()
        places = offsets.of_prompt([token.id for token in prompt], echo) if prompt else []
        tokens = [*prompt, *delta.tokens]
        return {
            "tokens": [self._vocabulary.token_text(token.id) for token in tokens],
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [self._alternatives(token) for token in tokens],
            "text_offset": [*places, *(offsets.next(token.id) for token in delta.tokens)],
        }

    def _alternatives(self, token: Token) -> dict[str, float] | None:
        if token.logprob is None:
            return None
        found: dict[str, float] = {}
        for other, logprob in sorted([*token.top, (token.id, token.logprob)], key=lambda pair: -pair[1]):
            found.setdefault(self._vocabulary.token_text(other), max(logprob, _IMPOSSIBLE))
        return found


class ChatReply(Reply):
    """POST /v1/chat/completions.

    Args:
        parser: makes the parser of a choice's tool calls; None where there are no tools.
    """

    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, *args: Any, parser: Callable[[], ToolParser] | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self._parser = parser
        self._parsers: dict[int, ToolParser] = {}

    def opening(self, job: Job) -> Iterator[dict[str, Any]]:
        for choice in job.choices:
            start = {"role": "assistant", "content": ""}
            yield self._chunk({"index": choice.index, "delta": start, "logprobs": None, "finish_reason": None})

    def chunk(self, delta: Delta) -> dict[str, Any] | None:
        calls = self._divide(delta)
        if not calls and not self._shows(delta):
            return None
        new: dict[str, Any] = {"content": delta.text} if delta.text else {}
        if calls:
            new["tool_calls"] = calls
        part = {"delta": new, "logprobs": self._scores(delta), **self._ids(delta)}
        return self._chunk({"index": delta.index, **part, "finish_reason": delta.finish})

    def _part(self, delta: Delta) -> dict[str, Any]:
        calls = self._divide(delta)
        message: dict[str, Any] = {"role": "assistant", "content": delta.text, "refusal": None}
        if calls:
            message["content"] = delta.text or None
            message["tool_calls"] = [{k: v for k, v in call.items() if k != "index"} for call in calls]
        return {"message": message, "logprobs": self._scores(delta), **self._ids(delta)}

    def _divide(self, delta: Delta) -> list[dict[str, Any]]:
        """Take the tool calls out of a delta's text; one that ends with some ends because of them."""
        if self._parser is None:
            return []
        parser = self._parsers.get(delta.index) or self._parsers.setdefault(delta.index, self._parser())
        delta.text, calls = parser.feed(delta.text)
        if delta.finish is not None:
            rest, more = parser.flush()
            delta.text, calls = delta.text + rest, calls + more
            if parser.count and delta.finish == "stop":
                delta.finish = "tool_calls"
        return calls

    def _scores(self, delta: Delta) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        content = []
        for token in delta.tokens:
            others = [self._entry(other, logprob) for other, logprob in token.top]
            content.append({**self._entry(token.id, token.logprob), "top_logprobs": others})
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        raw = self._vocabulary.token_bytes(token)
        return {
            "token": self._vocabulary.token_text(token),
            "logprob": _finite(logprob),
            "bytes": None if raw is None else list(raw),
        }


def usage(choices: Sequence[Choice]) -> dict[str, Any]:
    """Token counts of an answer. A prompt counts once, however many choices continue it."""
    prompts = {id(choice.request.prompt): choice for choice in reversed(choices)}
    prompt = sum(len(choice.request.prompt) for choice in prompts.values())
    generated = sum(choice.generated for choice in choices)
    reused = sum(choice.usage.reused_tokens for choice in prompts.values() if choice.usage is not None)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": reused},
    }


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, _IMPOSSIBLE)
