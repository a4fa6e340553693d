"""The ASGI application: its routes, and how a group of requests becomes a response or a stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response

from ..version import __version__
from . import chat_page, docs_page, errors
from .answer import answer
from .bodies.openai import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from .dialects import anthropic, embeddings, responses
from .dialects.chat import answer_chat
from .errors import STREAMED, ApiError
from .http.guard import Guard
from .operations import metrics
from .operations.tracing import Tracing
from .pool.pool import Pool
from .replies import ChatReply, CompletionReply

# A context of 128k tokens is about 0.6 MB of text, so this holds a batch of them. Parsing JSON blocks the event loop: a
# few tenths of a second for 4 MiB in the worst case.
MAX_BODY_BYTES = 4 * 2**20


def create_app(
    pool: Pool,
    *,
    api_key: str | None = None,
    cors_origins: Sequence[str] = (),
    max_body_bytes: int = MAX_BODY_BYTES,
    page: bool = True,
    tracing: Tracing | None = None,
) -> FastAPI:
    """The ASGI application over models, which may still be loading.

    Args:
        pool: the models.
        api_key: the Bearer token required by every path but /health, /version and /metrics; None requires none.
        cors_origins: web origins that browsers may call from; "*" allows any.
        max_body_bytes: a larger body returns 413. page: whether / is a page to chat with.
        tracing: makes the spans of requests; None is where the process has set up OpenTelemetry.
    """
    # FastAPI's own pages load scripts from another host, which a machine without the internet does not reach.
    app = FastAPI(
        title="trirun",
        version=__version__,
        description="OpenAI's API over trirun's engine.",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        responses=errors.refusals(errors.ErrorDocument),
    )
    errors.install(app)
    # The middleware added last runs first: a browser's preflight request carries no key and must not reach the guard.
    app.add_middleware(Guard, api_key=api_key, max_body_bytes=max_body_bytes, tracing=tracing)
    if cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id"],
        )
    _add_completions(app, pool)
    anthropic.add(app, pool)
    responses.add(app, pool)
    embeddings.add(app, pool)
    _add_information(app, pool)
    if page:
        # It asks for the API key, so it needs none itself.
        app.get("/", include_in_schema=False, response_model=None)(chat_page.response)
    return app


def _add_completions(app: FastAPI, pool: Pool) -> None:
    @app.post("/v1/completions", response_model=None, responses=STREAMED)
    async def completions(request: Request, body: CompletionBody) -> Response:
        """Continue prompts: strings or token ids, one or several."""
        arrived = time.perf_counter()
        body.check_fields()
        async with pool.use(body.model, request) as service:
            group, echoes = await service.complete(body, arrived)
            reply = CompletionReply(
                body.model or service.names[0],
                service.model.tokenizer,
                logprobs=body.logprobs is not None,
                token_ids=bool(body.return_token_ids),
                usage=body.wants_usage,
                as_ids=bool(body.return_tokens_as_token_ids),
                prompt_scores=body.prompt_logprobs is not None,
                echoes=echoes,
            )
            return await answer(request, service, group, reply, stream=bool(body.stream))

    @app.post("/v1/chat/completions", response_model=None, responses=STREAMED)
    async def chat(request: Request, body: ChatBody) -> Response:
        """Answer a conversation through the model's chat template."""
        arrived = time.perf_counter()
        body.check_fields()
        stream, usage = bool(body.stream), body.wants_usage
        return await answer_chat(request, pool, body.model, body, arrived, ChatReply, stream=stream, usage=usage)


def _add_information(app: FastAPI, pool: Pool) -> None:
    def card(name: str) -> dict:
        entry = pool.entry(name)
        return {
            "id": name,
            "object": "model",
            "created": pool.created,
            "owned_by": "trirun",
            "root": entry.name,
            "max_model_len": entry.context,
            "loaded": entry.state == "loaded",
        }

    @app.get("/v1/models")
    async def models() -> dict:
        """The models, each under each of its names."""
        return {"object": "list", "data": [card(name) for name in pool.names]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict:
        """A model under one of its names."""
        return card(name)

    @app.get("/health", response_model=None)
    async def health() -> Response:
        """200 when the server takes requests; 503 while it loads or drains, or after its only engine has failed."""
        status = pool.status
        if status != "ok":
            return ApiError(503, f"not ready: {status}", code=status).response()
        several = {"models": {entry.name: entry.state for entry in pool.entries}} if len(pool.entries) > 1 else {}
        return JSONResponse({"status": "ok"} | several)

    @app.get("/version")
    async def version() -> dict:
        """trirun's version."""
        return {"version": __version__}

    @app.get("/metrics", response_model=None, response_class=PlainTextResponse)
    async def prometheus() -> Response:
        """Metrics in Prometheus's text format."""
        return Response(pool.metrics.render(), headers={"Content-Type": metrics.CONTENT_TYPE})

    @app.post("/tokenize")
    async def tokenize(request: Request, body: TokenizeBody) -> dict:
        """Token ids of a text of any length, or of a conversation as the model reads it."""
        body.check_fields()
        async with pool.use(body.model, request) as service:
            tokenizer = service.model.tokenizer
            if body.prompt is None:
                ids = await tokenizer.render(body.messages or [], body)
            else:
                special = body.add_special_tokens
                (ids,) = await tokenizer.encode([body.prompt], special=special, param="prompt", fits=False)
            return {"tokens": ids, "count": len(ids), "max_model_len": tokenizer.context}

    @app.post("/detokenize")
    async def detokenize(request: Request, body: DetokenizeBody) -> dict:
        """The text of token ids."""
        async with pool.use(body.model, request) as service:
            return {"prompt": await service.model.tokenizer.detokenize(body.tokens)}

    @app.get("/tokenizer_info")
    async def tokenizer_info(request: Request, model: str | None = None) -> dict:
        """The tokenizer's special tokens and chat template, for clients that use it through /tokenize."""
        async with pool.use(model, request) as service:
            return service.model.tokenizer.facts

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> dict:
        # Made once, in a tenth of a second, for which the event loop must not wait.
        return await asyncio.to_thread(app.openapi)

    @app.get("/docs", include_in_schema=False, response_model=None)
    async def docs() -> Response:
        return HTMLResponse(await asyncio.to_thread(lambda: docs_page.render(app.openapi())))
