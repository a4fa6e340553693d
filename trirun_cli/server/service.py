"""From validated bodies to jobs in the engine."""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..engine.engine import Engine
from ..engine.request import EngineStopped, Request
from ..engine.sampling import SamplingParams
from ..errors import TrirunError
from ..text.detokenizer import Detokenizer
from .errors import ApiError
from .event_bridge import Outbox
from .metrics import Metrics
from .request_group import Job
from .schema import ChatBody, CompletionBody, SamplingFields
from .tokenizer import Vocabulary

# Tokens of a completion that says nothing about it, as in OpenAI's interface.
DEFAULT_COMPLETION_TOKENS = 16
# Choices of one request, however long the queue may be.
MOST_CHOICES = 4096
_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Model:
    """What is served.

    Attributes:
        engine: started. stop_ids: end a text, unless ``ignore_eos``.
        defaults: of temperature, top_p, top_k, min_p and repetition_penalty, where a request says nothing.
    """

    engine: Engine
    vocabulary: Vocabulary
    stop_ids: frozenset[int]
    defaults: Mapping[str, float] = field(default_factory=dict)


class Service:
    """The model behind the routes: absent while it loads, and gone when the engine has failed.

    Args:
        names: under which the model is served; the first is the one it is listed by.
        max_waiting: choices that may wait for a slot; None is no limit.
    """

    def __init__(self, names: Sequence[str], *, max_waiting: int | None = None) -> None:
        self.names, self.created = list(names), int(time.time())
        self.draining = False
        self._max_waiting = max_waiting
        self._model: Model | None = None
        self._outbox: Outbox | None = None
        self.metrics = Metrics(self.names[0], lambda: None if self._model is None else self._model.engine)
        self._jobs: set[Job] = set()

    def ready(self, model: Model, outbox: Outbox) -> None:
        """The model is loaded."""
        self._outbox, self._model = outbox, model

    @property
    def status(self) -> str:
        """One of "loading", "ok", "draining", and "dead", which is an engine that has failed."""
        if self._model is None:
            return "loading"
        if self.draining:
            return "draining"
        return "ok" if self._model.engine.alive else "dead"

    @property
    def model(self) -> Model:
        """The model.

        Raises:
            ApiError: 503 while it is loading or the server stops, 500 when its engine has failed.
        """
        status = self.status
        if status in ("loading", "draining"):
            message = "the model is still loading" if status == "loading" else "the server is shutting down"
            raise ApiError(503, message, code=status, headers={"Retry-After": "5"})
        if status == "dead" or self._model is None:
            raise ApiError(500, "the engine has stopped after a failure; the server's log has more", code="engine_dead")
        return self._model

    def check_model(self, name: str | None) -> str:
        """The name to answer under.

        Raises:
            ApiError: 404, no model of that name is served.
        """
        if name is not None and name not in self.names:
            message = f"the model {name[:200]!r} is not served here; this is {', '.join(self.names)}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return name or self.names[0]

    async def complete(self, body: CompletionBody, arrived: float) -> tuple[Job, list[str] | None]:
        """A started job, and the texts to echo for its choices.

        Raises:
            ApiError: anything wrong with the request; 429.
        """
        vocabulary = self.model.vocabulary
        # Before anything that takes time for each of them.
        self._check_count(len(body.prompt) * (body.n or 1), "n" if len(body.prompt) == 1 else "prompt")
        prompts = []
        for index, prompt in enumerate(body.prompt):
            param = "prompt" if len(body.prompt) == 1 else f"prompt[{index}]"
            if isinstance(prompt, str):
                special = True if body.add_special_tokens is None else body.add_special_tokens
                ids = await vocabulary.encode(prompt, special=special, param=param)
                bos = vocabulary.tokenizer.bos_token_id
                ids = ids or ([bos] if bos is not None else [])
            else:
                ids = prompt
                # Only ids that can fit are worth a look at each.
                vocabulary.check_ids(ids[: vocabulary.context + 1], param)
            if not ids:
                raise ApiError(400, f"{param} has no tokens", param=param, code="invalid_value")
            prompts.append(tuple(ids))
        scores = body.logprobs if body.echo else None
        limit = body.max_tokens if "max_tokens" in body.model_fields_set else None
        requests = self._requests(
            body, prompts, "prompt", limit=limit, usual=DEFAULT_COMPLETION_TOKENS, logprobs=body.logprobs, scores=scores
        )
        job = self._start(requests, arrived)
        if not body.echo:
            return job, None
        texts = [text if isinstance(text, str) else vocabulary.decode(text) for text in body.prompt]
        return job, [text for text in texts for _ in range(body.n or 1)]

    async def chat(self, body: ChatBody, arrived: float) -> Job:
        """A started job.

        Raises:
            ApiError: anything wrong with the request; 429.
        """
        self._check_count(body.n or 1, "n")
        prompt = tuple(await self.model.vocabulary.render(body))
        if not prompt:
            raise ApiError(400, "messages have no tokens", param="messages", code="invalid_value")
        limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        return self._start(self._requests(body, [prompt], "messages", limit=limit, logprobs=logprobs), arrived)

    def abort_all(self) -> None:
        """End every request; their clients are told that the server is shutting down."""
        for job in list(self._jobs):
            job.abort(ApiError(503, "the server is shutting down", code="shutting_down"))

    def forget(self, job: Job) -> None:
        """A job's answer is over, one way or another."""
        job.close()
        self._jobs.discard(job)

    def _check_count(self, count: int, param: str) -> None:
        """Refuse a request of more choices than there is room for when nothing else is running."""
        most = MOST_CHOICES
        if self._max_waiting is not None:
            most = min(most, self.model.engine.slots + self._max_waiting)
        if count > most:
            message = f"the request asks for {count} choices; this server never takes more than {most} at once"
            raise ApiError(400, message, param=param, code="invalid_value")

    def _start(self, requests: Sequence[Request], arrived: float) -> Job:
        model = self.model
        assert self._outbox is not None
        job = Job(model.engine, self._outbox, self.metrics, arrived)
        decoder = model.vocabulary.decoder
        try:
            job.start(requests, lambda request: Detokenizer(decoder, request.prompt, request.params.stop))
        except EngineStopped as error:
            raise ApiError(500, str(error), code="engine_dead") from error
        except TrirunError as error:
            raise ApiError(400, str(error), code="invalid_value") from error
        self._jobs.add(job)
        return job

    def _requests(
        self,
        body: SamplingFields,
        prompts: Sequence[tuple[int, ...]],
        param: str,
        *,
        limit: int | None,
        usual: int | None = None,
        logprobs: int | None = None,
        scores: int | None = None,
    ) -> list[Request]:
        """One request per choice: ``n`` of each prompt. ``limit`` None is ``usual``, or else all that fits."""
        model, count = self.model, body.n or 1
        bias = body.logit_bias or {}
        model.vocabulary.check_ids(list(bias), "logit_bias")
        model.vocabulary.check_ids(body.stop_token_ids or [], "stop_token_ids")
        stop_ids = (frozenset() if body.ignore_eos else model.stop_ids) | frozenset(body.stop_token_ids or ())
        seed = secrets.randbits(64) if body.seed is None else body.seed
        requests = []
        for prompt in prompts:
            most = self._room(len(prompt), limit, param)
            if limit is None and usual is not None:
                most = min(most, usual)
            for index in range(count):
                try:
                    params = SamplingParams(
                        max_tokens=most,
                        # Choices differ by their seeds; the first is what n = 1 gives.
                        seed=(seed + index) & _MASK,
                        stop=tuple(body.stop or ()),
                        presence_penalty=body.presence_penalty or 0.0,
                        frequency_penalty=body.frequency_penalty or 0.0,
                        logit_bias=bias,
                        logprobs=logprobs,
                        prompt_logprobs=scores,
                        **self._choices(body),
                    )
                except TrirunError as error:
                    raise ApiError(400, str(error), code="invalid_value") from error
                requests.append(Request(uuid.uuid4().hex, prompt, params, stop_ids))
        return requests

    def _choices(self, body: SamplingFields) -> dict[str, Any]:
        usual = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
        chosen = {}
        for name, otherwise in usual.items():
            given = getattr(body, name)
            chosen[name] = self.model.defaults.get(name, otherwise) if given is None else given
        # −1 and 0 both stand for all tokens.
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
