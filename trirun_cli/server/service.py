"""A model behind the routes, and how a validated body becomes a group of requests in its engine."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..engine.constraint import Constraint, Grammar
from ..engine.engine import Engine
from ..engine.request import EngineStopped, Request
from ..engine.sampling import SamplingParams
from ..errors import MissingError, TrirunError, UsageError
from ..text.detokenizer import Detokenizer
from ..text.reasoning import ReasoningParser
from ..text.tool_calls import special_calls
from .bodies.chat_grammar import chat_grammar, reasoning_of
from .bodies.openai import ChatBody, CompletionBody, SamplingFields
from .errors import ApiError
from .event_bridge import EventBridge
from .model import ServedModel
from .operations.metrics import ModelMetrics
from .request_group import RequestGroup

# Tokens of a completion without ``max_tokens``, as in OpenAI's API.
DEFAULT_COMPLETION_TOKENS = 16
# Choices of one request, however long the queue is.
MOST_CHOICES = 4096
# Tokens that one request may ask for in all; a single choice may always fill the context.
MOST_TOKENS = 2**22
_MASK = 2**64 - 1


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
        self._groups: set[RequestGroup] = set()

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
        prompts = await self._prompts(body)
        scores = body.logprobs if body.echo else None
        limit = body.max_tokens if "max_tokens" in body.model_fields_set else None
        requests = self._requests(
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
        prompt = tuple(await self.model.tokenizer.render(body.messages, body))
        if not prompt:
            raise ApiError(400, "messages have no tokens", param="messages", code="invalid_value")
        limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        constraint = await self._constraint(body, lambda: chat_grammar(body, self.model.tokenizer, prompt))
        requests = self._requests(body, [prompt], "messages", constraint, limit=limit, logprobs=logprobs)
        special = body.offers_tools and special_calls(self.model.tokenizer.tool_template or "")
        return self._start(requests, arrived, body, special=special)

    def reasoning_parser(self, group: RequestGroup) -> Callable[[], ReasoningParser] | None:
        """What makes the parsers of a chat group's reasoning; None where the model's chat template knows of none."""
        found = reasoning_of(self.model.tokenizer, group.choices[0].request.prompt)
        return None if found == "none" else partial(ReasoningParser, found == "open")

    def abort_all(self) -> None:
        """Cancel every request; clients get 503 ``shutting_down``, in a stream as its last event."""
        for group in list(self._groups):
            group.abort(ApiError(503, "the server is shutting down", code="shutting_down"))

    def forget(self, group: RequestGroup) -> None:
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
                special=special,
            )

        try:
            group.start(requests, detokenizer)
        except EngineStopped as error:
            raise ApiError(500, str(error), code="engine_dead") from error
        except TrirunError as error:
            raise ApiError(400, str(error), code="invalid_value") from error
        self._groups.add(group)
        return group

    def _requests(
        self,
        body: SamplingFields,
        prompts: Sequence[tuple[int, ...]],
        param: str,
        constraint: Callable[[], Constraint] | None,
        *,
        limit: int | None,
        default: int | None = None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
    ) -> list[Request]:
        """One request per choice: ``n`` of each prompt.

        Args:
            param: the field of the prompts. constraint: begins that of a text.
            limit: of generated tokens; None is ``default``, or what fits the context.
        """
        model, count = self.model, body.n or 1
        bias = body.logit_bias or {}
        model.tokenizer.check_ids(list(bias), "logit_bias")
        model.tokenizer.check_ids(body.stop_token_ids or [], "stop_token_ids")
        stop_ids = (frozenset() if body.ignore_eos else model.stop_ids) | frozenset(body.stop_token_ids or ())
        seed = secrets.randbits(64) if body.seed is None else body.seed
        requests: list[Request] = []
        asked = 0
        for prompt in prompts:
            most = self._room(len(prompt), limit, param)
            if limit is None and default is not None:
                most = min(most, default)
            if (least := body.min_tokens or 0) > most:
                message = f"min_tokens: {least} tokens, and at most {most} are generated"
                raise ApiError(400, message, param="min_tokens", code="invalid_value")
            asked += most * count
            if asked > MOST_TOKENS and len(prompts) * count > 1:
                message = (
                    f"the choices may have {asked} tokens in all, at most {MOST_TOKENS} are taken: give max_tokens"
                )
                raise ApiError(400, message, param="max_tokens", code="invalid_value")
            for index in range(count):
                try:
                    params = SamplingParams(
                        max_tokens=most,
                        # Choices differ by their seeds; the first one is that of n = 1.
                        seed=(seed + index) & _MASK,
                        stop=tuple(body.stop or ()),
                        presence_penalty=body.presence_penalty or 0.0,
                        frequency_penalty=body.frequency_penalty or 0.0,
                        logit_bias=bias,
                        min_tokens=least,
                        logprobs=logprobs,
                        prompt_logprobs=prompt_logprobs,
                        **self._sampling(body),
                    )
                except TrirunError as error:
                    raise ApiError(400, str(error), code="invalid_value") from error
                requests.append(Request(uuid.uuid4().hex, prompt, params, stop_ids, constraint))
        return requests

    async def _prompts(self, body: CompletionBody) -> list[tuple[int, ...]]:
        """The token ids of a completion's prompts: texts, or ids already."""
        tokenizer = self.model.tokenizer
        special = True if body.add_special_tokens is None else body.add_special_tokens
        if isinstance(body.prompt[0], str):
            bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
            encoded = await tokenizer.encode(body.prompt, special=special, param="prompt")
            prompts = [tuple(ids or bos) for ids in encoded]
        else:
            prompts = [tuple(ids) for ids in body.prompt]
        for index, ids in enumerate(prompts):
            param = "prompt" if len(prompts) == 1 else f"prompt[{index}]"
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
            except UsageError as error:
                raise ApiError(400, f"{param}: {error}", param=param, code="unsupported_grammar") from error
            except MissingError as error:
                raise ApiError(501, str(error), param=param, code="not_installed") from error

        return await self.model.tokenizer.preparation.run(compiled, "the grammar")

    def _sampling(self, body: SamplingFields) -> dict[str, Any]:
        openai = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
        chosen = {}
        for name, default in openai.items():
            given = getattr(body, name)
            chosen[name] = self.model.defaults.get(name, default) if given is None else given
        # −1 and 0 both mean every token.
        return chosen | {"top_k": max(int(chosen["top_k"]), 0)}

    def _room(self, prompt: int, limit: int | None, param: str) -> int:
        """Tokens to generate after a prompt: ``limit``, or all that fit the context."""
        context = self.model.engine.context
        wanted = 1 if limit is None else limit
        if prompt + wanted > context:
            asked = f"{prompt} in {param}" + ("" if limit is None else f" and {limit} to generate")
            message = f"the context has {context} tokens; the request needs {prompt + wanted} ({asked})"
            where = param if prompt >= context or limit is None else "max_tokens"
            raise ApiError(400, message, param=where, code="context_length_exceeded")
        return context - prompt if limit is None else limit
