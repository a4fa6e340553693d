"""A model behind the routes, and how a validated body becomes a group of requests in its engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ..engine.constraint import Constraint, Grammar
from ..engine.engine import Engine
from ..engine.request import EngineStopped, Request
from ..errors import InputError, MissingError, TrirunError, UsageError
from ..text.detokenizer import Detokenizer
from ..text.harmony import ChannelParser, has_channels
from ..text.reasoning import ReasoningParser
from ..text.tool_calls import special_calls
from .bodies.chat_grammar import chat_grammar, reasoning_of
from .bodies.embeddings import EmbeddingsBody
from .bodies.openai import ChatBody, CompletionBody, SamplingFields
from .choices import requests_of
from .embedding_group import EmbeddingGroup
from .errors import ApiError
from .event_bridge import EventBridge
from .model import ServedModel
from .operations.metrics import ModelMetrics
from .request_group import RequestGroup

if TYPE_CHECKING:
    import numpy as np

# Tokens of a completion without ``max_tokens``, as in OpenAI's API.
DEFAULT_COMPLETION_TOKENS = 16
# Choices of one request, however long the queue is.
MOST_CHOICES = 4096


class Service:
    """One loaded model behind the routes, and every group of requests that runs on it.

    Args:
        model: started. bridge: carries its events to the event loop. metrics: of the model.
        names: of the model in the API. max_waiting: choices that may wait for a slot; None is no limit.
        ended: called whenever a group has ended.
    """

    def __init__(
        self,
        model: ServedModel,
        bridge: EventBridge,
        metrics: ModelMetrics,
        names: Sequence[str],
        max_waiting: int | None = None,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        self.names, self._max_waiting = list(names), max_waiting
        self._model, self._bridge, self._metrics, self._ended = model, bridge, metrics, ended
        self._groups: set[RequestGroup | EmbeddingGroup] = set()

    @property
    def model(self) -> ServedModel:
        """The model.

        Raises:
            ApiError: 500, its engine has failed.
        """
        if not self.alive:
            raise ApiError(500, "the engine has stopped after a failure; the server's log has more", code="engine_dead")
        return self._model

    @property
    def engine(self) -> Engine:
        """The model's engine, alive or not."""
        return self._model.engine

    @property
    def alive(self) -> bool:
        """Whether the engine takes requests."""
        return self._model.engine.alive

    @property
    def busy(self) -> bool:
        """Whether a group runs on the model."""
        return bool(self._groups)

    @property
    def context(self) -> int:
        """Most tokens of a sequence."""
        return self._model.engine.context

    async def complete(self, body: CompletionBody, arrived: float) -> tuple[RequestGroup, list[str] | None]:
        """Start the choices of a completion.

        Args:
            body: validated. arrived: when the request came, by time.perf_counter.

        Returns:
            the started group, and with ``echo`` the text of each choice's prompt, otherwise None.

        Raises:
            ApiError: 400, the request is invalid; 429, the queue is full; 500 or 503, there is no model to run it.
        """
        tokenizer = self.model.tokenizer
        # Checked before work that grows with the number of choices.
        self._check_count(len(body.prompt) * (body.n or 1), "n" if len(body.prompt) == 1 else "prompt")
        whole = await self._prompts(
            body.prompt, body.add_special_tokens is not False, "prompt", fits=body.truncate_prompt_tokens is None
        )
        prompts = [self._last(prompt, body) for prompt in whole]
        scores = body.logprobs if body.echo and body.logprobs is not None else body.prompt_logprobs
        limit = body.max_tokens if "max_tokens" in body.model_fields_set else None
        requests = requests_of(
            self.model,
            body,
            prompts,
            "prompt",
            await self._constraint(body, body.grammar),
            limit=limit,
            default=DEFAULT_COMPLETION_TOKENS,
            logprobs=body.logprobs,
            prompt_logprobs=scores,
        )
        echoes = None
        if body.echo:
            texts = [text if isinstance(text, str) else await tokenizer.detokenize(text) for text in body.prompt]
            echoes = [text for text in texts for _ in range(body.n or 1)]
        # Nothing may wait once the group has started: who leaves then would leave it behind.
        return self._start(requests, arrived, body), echoes

    async def chat(self, body: ChatBody, arrived: float) -> RequestGroup:
        """Start the choices of a chat completion; arguments and errors as of :meth:`complete`."""
        self._check_count(body.n or 1, "n")
        prompt = self._last(tuple(await self.model.tokenizer.render(body.messages, body)), body)
        if not prompt:
            raise ApiError(400, "messages have no tokens", param="messages", code="invalid_value")
        limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        constraint = await self._constraint(body, lambda: chat_grammar(body, self.model.tokenizer, prompt))
        requests = requests_of(
            self.model,
            body,
            [prompt],
            "messages",
            constraint,
            limit=limit,
            logprobs=logprobs,
            prompt_logprobs=body.prompt_logprobs,
        )
        calls = body.offers_tools and special_calls(self.model.tokenizer.tool_template or "")
        special = calls or has_channels(self.model.tokenizer.chat_template)
        return self._start(requests, arrived, body, special=special)

    def reasoning_parser(self, group: RequestGroup) -> Callable[[], ReasoningParser | ChannelParser] | None:
        """What makes the parsers of a chat group's reasoning; None where the model's chat template knows of none."""
        if has_channels(self.model.tokenizer.chat_template):
            return ChannelParser
        found = reasoning_of(self.model.tokenizer, group.choices[0].request.prompt)
        return None if found == "none" else partial(ReasoningParser, found == "open")

    def abort_all(self) -> None:
        """Cancel every request; clients get 503 ``shutting_down``, in a stream as its last event."""
        for group in list(self._groups):
            group.abort(ApiError(503, "the server is shutting down", code="shutting_down"))

    def forget(self, group: RequestGroup | EmbeddingGroup) -> None:
        """Cancel what still runs of a group whose response has ended, for whatever reason."""
        group.close()
        self._groups.discard(group)
        self._ended()

    def _check_count(self, count: int, param: str) -> None:
        """Refuse a request with more choices than an idle server would take."""
        most = MOST_CHOICES
        if self._max_waiting is not None:
            most = min(most, self.model.engine.slots + self._max_waiting)
        if count > most:
            message = f"the request asks for {count} choices; this server never takes more than {most} at once"
            raise ApiError(400, message, param=param, code="invalid_value")

    def _start(
        self, requests: Sequence[Request], arrived: float, body: SamplingFields, *, special: bool = False
    ) -> RequestGroup:
        model = self.model
        group = RequestGroup(model.engine, self._bridge, self._metrics, arrived)

        def detokenizer(request: Request) -> Detokenizer:
            include = bool(body.include_stop_str_in_output)
            params = request.params
            return Detokenizer(
                model.tokenizer,
                request.prompt,
                params.stop,
                include_stop=include,
                min_tokens=params.min_tokens,
                special=special or body.skip_special_tokens is False,
            )

        try:
            group.start(requests, detokenizer)
        except EngineStopped as error:
            raise ApiError(500, str(error), code="engine_dead") from error
        except TrirunError as error:
            raise ApiError(400, str(error), code="invalid_value") from error
        self._groups.add(group)
        return group

    async def embed(self, body: EmbeddingsBody) -> tuple[list[np.ndarray], int]:
        """The embeddings of a request's texts, float32 [hidden] each, and how many tokens they have.

        Raises:
            ApiError: 400, the request is invalid; 429, the queue is full; 500 or 503, there is no model to run it; 501,
                what runs the model gives no hidden states.
        """
        model = self.model
        if not model.engine.has_states:
            message = f"{model.engine.name} gives no hidden states, of which embeddings are made; a CPU does"
            raise ApiError(501, message, code="unsupported_endpoint")
        prompts = await self._prompts(body.input, body.add_special_tokens, "input")
        for index, prompt in enumerate(prompts):
            if len(prompt) > model.engine.context:
                message = (
                    f"input[{index}] has {len(prompt)} tokens, the context {model.engine.context} (--ctx of the server)"
                )
                raise ApiError(400, message, param="input", code="context_length_exceeded")
        group = EmbeddingGroup(model.engine, self._bridge, self._metrics)
        self._groups.add(group)
        try:
            found = await group.run(prompts, body.pooling or model.pooling)
        except ExceptionGroup as errors:
            first = errors.exceptions[0]
            if isinstance(first, EngineStopped):
                raise ApiError(500, str(first), code="engine_dead") from None
            raise first from None
        finally:
            self.forget(group)
        return found, sum(map(len, prompts))

    def _last(self, prompt: tuple[int, ...], body: SamplingFields) -> tuple[int, ...]:
        """What ``truncate_prompt_tokens`` leaves of a prompt: its last tokens."""
        count = body.truncate_prompt_tokens
        return prompt if count is None else prompt[-(self.context - 1 if count < 0 else count) :]

    async def _prompts(
        self, given: Sequence[Any], special: bool, name: str, *, fits: bool = True
    ) -> list[tuple[int, ...]]:
        """The token ids of the prompts in the field ``name``: texts, or ids already."""
        tokenizer = self.model.tokenizer
        if isinstance(given[0], str):
            bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
            encoded = await tokenizer.encode(given, special=special, param=name, fits=fits)
            prompts = [tuple(ids or bos) for ids in encoded]
        else:
            prompts = [tuple(ids) for ids in given]
        for index, ids in enumerate(prompts):
            param = name if len(prompts) == 1 else f"{name}[{index}]"
            # A longer prompt is refused anyway, so only as many ids as fit are checked.
            tokenizer.check_ids(ids[: tokenizer.context + 1], param)
            if not ids:
                raise ApiError(400, f"{param} has no tokens", param=param, code="invalid_value")
        return prompts

    async def _constraint(
        self, body: SamplingFields, find: Callable[[], tuple[Grammar, str] | None]
    ) -> Callable[[], Constraint] | None:
        """What begins the constraint of a text of the grammar that ``find`` finds in the body, on another thread; the
        field that asks for it is named where it cannot be."""
        if not body.binds_text:
            return None
        grammars = self.model.grammars

        def compiled() -> Callable[[], Constraint] | None:
            if (asked := find()) is None:
                return None
            grammar, param = asked
            if body.ignore_eos:
                message = f"{param} and ignore_eos exclude each other: the grammar says where the text ends"
                raise ApiError(400, message, param="ignore_eos", code="invalid_value")
            try:
                return grammars.compile(grammar)
            # The grammar cannot be held, or the model has no tokens to hold one with.
            except (UsageError, InputError) as error:
                raise ApiError(400, f"{param}: {error}", param=param, code="unsupported_grammar") from error
            except MissingError as error:
                raise ApiError(501, str(error), param=param, code="not_installed") from error

        return await self.model.tokenizer.preparation.run(compiled, "the grammar")
