"""The documents of the two completion endpoints: a whole response, or the chunks of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from typing import Any

from ..engine.sampling import Token
from ..text.harmony import ChannelParser
from ..text.reasoning import ReasoningParser
from ..text.tool_parsers import ToolParser
from .errors import ApiError
from .http import sse
from .request_group import Delta, RequestGroup
from .tokenizer import Offsets, ServerTokenizer

# JSON has no −∞; OpenAI and vLLM write this number instead.
_MINUS_INFINITY = -9999.0


class Reply:
    """What the replies of both endpoints share.

    Args:
        model: the name that the request asked for. tokenizer: for the text of single tokens.
        logprobs: include tokens with their log-probabilities. token_ids: include token ids.
        as_ids: a token's text, beside its log-probability, is "token_id:" and its id. prompt_scores: include the
            prompt's log-probabilities, as vLLM writes them.
        usage: end a stream with a chunk of token counts; ``usage`` is null in every chunk before.
    """

    prefix, object, chunk_object = "", "", ""

    def __init__(
        self,
        model: str,
        tokenizer: ServerTokenizer,
        *,
        logprobs: bool,
        token_ids: bool,
        usage: bool = False,
        as_ids: bool = False,
        prompt_scores: bool = False,
    ) -> None:
        self._tokenizer, self._logprobs, self._token_ids = tokenizer, logprobs, token_ids
        self.with_usage, self._prompt_scores = usage, prompt_scores
        self._name: Callable[[int], str] = "token_id:{}".format if as_ids else tokenizer.token_text
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def first_chunks(self, group: RequestGroup) -> Iterator[dict[str, Any]]:
        """Chunks of a stream before the first token."""
        return iter(())

    async def events(self, group: RequestGroup) -> AsyncIterator[bytes]:
        """The whole stream, encoded."""
        for document in self.first_chunks(group):
            yield sse.event(document)
        try:
            async for delta in group.deltas():
                data = await sse.dumps_of(partial(self.chunk, delta), len(delta.tokens) + len(delta.scores))
                if data != b"null":
                    yield sse.event_of(data)
        except ApiError as error:
            # The status line is already sent; OpenAI's clients also read an error from the stream.
            yield sse.event(error.body)
        else:
            if self.with_usage:
                yield sse.event(self.usage_chunk(group))
        yield sse.DONE

    def chunk(self, delta: Delta) -> dict[str, Any] | None:
        """A chunk of a stream; None where the delta has nothing that the client asked for."""
        if not self._shows(delta):
            return None
        return self._chunk({"index": delta.index, **self._part(delta), "finish_reason": delta.finish})

    def usage_chunk(self, group: RequestGroup) -> dict[str, Any]:
        """The last chunk of a stream, with its token counts."""
        return {**self._head, "object": self.chunk_object, "choices": [], "usage": usage(group)}

    def document(self, group: RequestGroup, deltas: Sequence[Delta]) -> dict[str, Any]:
        """The response that is not streamed; ``deltas`` has one delta per choice."""
        choices = [{"index": d.index, **self._part(d), "finish_reason": d.finish} for d in deltas]
        return {**self._head, "object": self.object, "choices": choices, "usage": usage(group)}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        document = {**self._head, "object": self.chunk_object, "choices": [choice]}
        return document | {"usage": None} if self.with_usage else document

    def _shows(self, delta: Delta) -> bool:
        tokens = self._logprobs or self._token_ids
        return bool(delta.text or delta.finish or (tokens and (delta.tokens or delta.scores)))

    def _part(self, delta: Delta) -> dict[str, Any]:
        raise NotImplementedError

    def _scores_of(self, delta: Delta) -> dict[str, Any]:
        """vLLM's log-probabilities of a prompt: of each token but the first, and of the likeliest there, by id. The
        rank of a token beyond those is not known."""
        if not self._prompt_scores:
            return {}
        found: list[dict[str, Any] | None] = []
        for token in delta.scores:
            if token.logprob is None:
                found.append(None)
                continue
            ranks = {other: rank for rank, (other, _) in enumerate(token.top, 1)}
            values = dict(token.top) | {token.id: token.logprob}
            found.append(
                {
                    str(id): {"logprob": _finite(value), "rank": ranks.get(id), "decoded_token": self._name(id)}
                    for id, value in values.items()
                }
            )
        return {"prompt_logprobs": found}

    def _ids(self, delta: Delta) -> dict[str, Any]:
        return {"token_ids": [token.id for token in delta.tokens]} if self._token_ids else {}


class CompletionReply(Reply):
    """POST /v1/completions.

    Args:
        echoes: the text of each choice's prompt, which precedes its own; None without ``echo``.
    """

    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, *args: Any, echoes: Sequence[str] | None, **options: Any) -> None:
        super().__init__(*args, **options)
        self._echoes = dict(enumerate(echoes or ()))
        self._offsets: dict[int, Offsets] = {}
        self._echoing = echoes is not None

    def _shows(self, delta: Delta) -> bool:
        # A choice's first delta carries its echo, even if it has nothing else.
        return delta.index in self._echoes or super()._shows(delta)

    def _part(self, delta: Delta) -> dict[str, Any]:
        echo = self._echoes.pop(delta.index, "")
        logprobs = self._logprobs_of(delta, echo) if self._logprobs else None
        return {"text": echo + delta.text, "logprobs": logprobs, **self._ids(delta), **self._scores_of(delta)}

    def _logprobs_of(self, delta: Delta, echo: str) -> dict[str, Any]:
        offsets = self._offsets.setdefault(delta.index, Offsets(self._tokenizer))
        prompt = delta.scores if self._echoing else ()
        places = offsets.of_prompt([token.id for token in prompt], echo) if prompt else []
        tokens = [*prompt, *delta.tokens]
        return {
            "tokens": [self._name(token.id) for token in tokens],
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [self._alternatives(token) for token in tokens],
            "text_offset": [*places, *(offsets.next(token.id) for token in delta.tokens)],
        }

    def _alternatives(self, token: Token) -> dict[str, float] | None:
        if token.logprob is None:
            return None
        found: dict[str, float] = {}
        for other, logprob in sorted([*token.top, (token.id, token.logprob)], key=lambda pair: -pair[1]):
            found.setdefault(self._name(other), max(logprob, _MINUS_INFINITY))
        return found


class ChatReply(Reply):
    """POST /v1/chat/completions.

    Args:
        parser: makes the tool-call parser of a choice; None where the request offers no tools.
        one_call: only the first tool call of a choice is part of the response, as ``parallel_tool_calls: false`` asks.
        reasoning: makes the parser of a choice's reasoning; None where the chat template knows of none.
        with_reasoning: it is part of the response.
    """

    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        *args: Any,
        parser: Callable[[], ToolParser] | None = None,
        one_call: bool = False,
        reasoning: Callable[[], ReasoningParser | ChannelParser] | None = None,
        with_reasoning: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self._parser, self._one_call = parser, one_call
        self._parsers: dict[int, ToolParser] = {}
        self._reasoning, self._with_reasoning = reasoning, with_reasoning
        self._reasoners: dict[int, ReasoningParser | ChannelParser] = {}

    def first_chunks(self, group: RequestGroup) -> Iterator[dict[str, Any]]:
        for choice in group.choices:
            start = {"role": "assistant", "content": ""}
            yield self._chunk({"index": choice.index, "delta": start, "logprobs": None, "finish_reason": None})

    def document(self, group: RequestGroup, deltas: Sequence[Delta]) -> dict[str, Any]:
        # All choices have one prompt.
        return super().document(group, deltas) | self._scores_of(deltas[0])

    def chunk(self, delta: Delta) -> dict[str, Any] | None:
        calls = self.extract(delta)
        if not calls and not delta.reasoning and not self._shows(delta):
            return None
        new: dict[str, Any] = {"content": delta.text} if delta.text else {}
        if delta.reasoning:
            new["reasoning_content"] = delta.reasoning
        if calls:
            new["tool_calls"] = calls
        part = {"delta": new, "logprobs": self._logprobs_of(delta), **self._ids(delta)}
        return self._chunk({"index": delta.index, **part, "finish_reason": delta.finish})

    def _part(self, delta: Delta) -> dict[str, Any]:
        calls = self.extract(delta)
        message: dict[str, Any] = {"role": "assistant", "content": delta.text, "refusal": None}
        if self._reasoning is not None:
            message["reasoning_content"] = delta.reasoning or None
        if calls:
            message["content"] = delta.text or None
            message["tool_calls"] = [{k: v for k, v in call.items() if k != "index"} for call in calls]
        return {"message": message, "logprobs": self._logprobs_of(delta), **self._ids(delta)}

    def extract(self, delta: Delta) -> list[dict[str, Any]]:
        """Move the reasoning of a delta's text to its place, and the tool calls of the rest to the result."""
        if self._reasoning is not None:
            parser = self._reasoners.get(delta.index) or self._reasoners.setdefault(delta.index, self._reasoning())
            delta.reasoning, delta.text = parser.feed(delta.text)
            if delta.finish is not None:
                rest, answer = parser.flush()
                delta.reasoning, delta.text = delta.reasoning + rest, delta.text + answer
            if not self._with_reasoning:
                delta.reasoning = ""
        return self._extract_calls(delta)

    def _extract_calls(self, delta: Delta) -> list[dict[str, Any]]:
        """Move the tool calls from a delta's text to the result; with calls, "stop" becomes "tool_calls"."""
        if self._parser is None:
            return []
        parser = self._parsers.get(delta.index) or self._parsers.setdefault(delta.index, self._parser())
        delta.text, calls = parser.feed(delta.text)
        if delta.finish is not None:
            rest, more = parser.flush()
            delta.text, calls = delta.text + rest, calls + more
            if parser.count and delta.finish == "stop":
                delta.finish = "tool_calls"
        return [call for call in calls if call["index"] == 0] if self._one_call else calls

    def _logprobs_of(self, delta: Delta) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        content = []
        for token in delta.tokens:
            others = [self._entry(other, logprob) for other, logprob in token.top]
            content.append({**self._entry(token.id, token.logprob), "top_logprobs": others})
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token)
        return {
            "token": self._name(token),
            "logprob": _finite(logprob),
            "bytes": None if raw is None else list(raw),
        }


def usage(group: RequestGroup) -> dict[str, Any]:
    """Token counts of a response."""
    prompt, cached, generated = group.token_counts
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, _MINUS_INFINITY)
