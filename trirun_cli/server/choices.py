"""What a request's fields say, as one request of the engine for each choice."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..engine.constraint import Constraint, Only, Without
from ..engine.request import Request
from ..engine.sampling import SamplingParams
from ..errors import TrirunError
from .bodies.openai import SamplingFields
from .errors import ApiError
from .model import ServedModel

# Tokens that one request may ask for in all; a single choice may always fill the context.
MOST_TOKENS = 2**22
_MASK = 2**64 - 1


def requests_of(
    model: ServedModel,
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
        logprobs, prompt_logprobs: of :class:`~trirun_cli.engine.sampling.SamplingParams`.

    Raises:
        ApiError: 400, naming the field that is invalid.
    """
    count = body.n or 1
    bias = body.logit_bias or {}
    model.tokenizer.check_ids(list(bias), "logit_bias")
    model.tokenizer.check_ids(body.stop_token_ids or [], "stop_token_ids")
    stop_ids = (frozenset() if body.ignore_eos else model.stop_ids) | frozenset(body.stop_token_ids or ())
    seed = secrets.randbits(64) if body.seed is None else body.seed
    requests: list[Request] = []
    asked = 0
    begin = _narrowed(model, body, constraint)
    for prompt in prompts:
        most = _room(model, len(prompt), limit, param)
        if limit is None and default is not None:
            most = min(most, default)
        if (least := body.min_tokens or 0) > most:
            message = f"min_tokens: {least} tokens, and at most {most} are generated"
            raise ApiError(400, message, param="min_tokens", code="invalid_value")
        asked += most * count
        if asked > MOST_TOKENS and len(prompts) * count > 1:
            message = f"the choices may have {asked} tokens in all, at most {MOST_TOKENS} are taken: give max_tokens"
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
                    **_sampling(model, body),
                )
            except TrirunError as error:
                raise ApiError(400, str(error), code="invalid_value") from error
            requests.append(Request(uuid.uuid4().hex, prompt, params, stop_ids, begin))
    return requests


def _narrowed(
    model: ServedModel, body: SamplingFields, begin: Callable[[], Constraint] | None
) -> Callable[[], Constraint] | None:
    """A constraint with those of ``allowed_token_ids`` and ``bad_words`` around it."""
    vocab, ids, words = model.engine.vocab_size, body.allowed_token_ids, body.bad_words
    if ids is not None:
        model.tokenizer.check_ids(ids, "allowed_token_ids")
        begin = partial(_with, partial(Only, ids, vocab), begin)
    if words:
        begin = partial(_with, partial(Without, model.tokenizer.spellings(words)), begin)
    return begin


def _with(outer: Callable[[Constraint | None], Constraint], begin: Callable[[], Constraint] | None) -> Constraint:
    return outer(begin and begin())


def _sampling(model: ServedModel, body: SamplingFields) -> dict[str, Any]:
    openai = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    chosen = {}
    for name, default in openai.items():
        given = getattr(body, name)
        chosen[name] = model.defaults.get(name, default) if given is None else given
    # −1 and 0 both mean every token.
    return chosen | {"top_k": max(int(chosen["top_k"]), 0)}


def _room(model: ServedModel, prompt: int, limit: int | None, param: str) -> int:
    """Tokens to generate after a prompt: ``limit``, or all that fit the context."""
    context = model.engine.context
    wanted = 1 if limit is None else limit
    if prompt + wanted > context:
        asked = f"{prompt} in {param}" + ("" if limit is None else f" and {limit} to generate")
        message = (
            f"the context has {context} tokens (--ctx of the server); the request needs {prompt + wanted} ({asked})"
        )
        where = param if prompt >= context or limit is None else "max_tokens"
        raise ApiError(400, message, param=where, code="context_length_exceeded")
    return context - prompt if limit is None else limit
