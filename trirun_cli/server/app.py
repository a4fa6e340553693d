"""The ASGI application: its routes, and how a group of requests becomes a response or a stream."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, Response

from ..text.tool_calls import parser_for
from ..version import __version__
from . import chat_page, docs_page, errors, metrics
from .answer import answer
from .bodies.openai import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from .dialects import anthropic, responses
from .errors import ApiError
from .guard import Guard
from .replies import ChatReply, CompletionReply
from .service import Service

# A context of 128k tokens is about 0.6 MB of text, so this holds a batch of them. Parsing JSON blocks the event loop: a
# few tenths of a second for 4 MiB in the worst case.
MAX_BODY_BYTES = 4 * 2**20


def create_app(
    service: Service,
    *,
    api_key: str | None = None,
    cors_origins: Sequence[str] = (),
    max_body_bytes: int = MAX_BODY_BYTES,
    page: bool = True,
) -> FastAPI:
    """The ASGI application over a service, whose model may still be loading.

    Args:
        service: answers the requests.
        api_key: the Bearer token required by every path but /health, /version and /metrics; None requires none.
        cors_origins: web origins that browsers may call from; "*" allows any.
        max_body_bytes: a larger body returns 413. page: whether / is a page to chat with.
    """
    # FastAPI's own pages load scripts from another host, which a machine without the internet does not reach.
    app = FastAPI(
        title="trirun",
        version=__version__,
        description="OpenAI's API over trirun's engine.",
        docs_url=None,
        redoc_url=None,
    )
    errors.install(app)
    # The middleware added last runs first: a browser's preflight request carries no key and must not reach the guard.
    app.add_middleware(Guard, api_key=api_key, max_body_bytes=max_body_bytes)
    if cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id"],
        )
    _add_completions(app, service)
    anthropic.add(app, service)
    responses.add(app, service)
    _add_information(app, service)
    if page:
        # It asks for the API key, so it needs none itself.
        app.get("/", include_in_schema=False, response_model=None)(chat_page.response)
    return app


def _add_completions(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", response_model=None)
    async def completions(request: Request, body: CompletionBody) -> Response:
        """Continue prompts: strings or token ids, one or several."""
        arrived = time.perf_counter()
        body.check_fields()
        name, model = service.check_model(body.model), service.model
        group, echoes = await service.complete(body, arrived)
        reply = CompletionReply(
            name,
            model.tokenizer,
            logprobs=body.logprobs is not None,
            token_ids=bool(body.return_token_ids),
            usage=body.wants_usage,
            echoes=echoes,
        )
        return await answer(request, service, group, reply, stream=bool(body.stream))

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(request: Request, body: ChatBody) -> Response:
        """Answer a conversation through the model's chat template."""
        arrived = time.perf_counter()
        body.check_fields()
        name, model = service.check_model(body.model), service.model
        group = await service.chat(body, arrived)
        template = model.tokenizer.tool_template or ""
        reply = ChatReply(
            name,
            model.tokenizer,
            logprobs=bool(body.logprobs),
            token_ids=bool(body.return_token_ids),
            usage=body.wants_usage,
            parser=partial(parser_for, template) if body.offers_tools else None,
            one_call=body.parallel_tool_calls is False,
            reasoning=service.reasoning_parser(group),
        )
        return await answer(request, service, group, reply, stream=bool(body.stream))


def _add_information(app: FastAPI, service: Service) -> None:
    def card(name: str) -> dict:
        engine = service.model.engine
        return {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "trirun",
            "root": service.names[0],
            "max_model_len": engine.context,
        }

    @app.get("/v1/models")
    async def models() -> dict:
        """The model, under each of its names."""
        return {"object": "list", "data": [card(name) for name in service.names]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict:
        """The model under one of its names."""
        return card(service.check_model(name))

    @app.get("/health", response_model=None)
    async def health() -> Response:
        """200 when the server takes requests; 503 while it loads or drains, or after the engine has failed."""
        status = service.status
        if status != "ok":
            return ApiError(503, f"not ready: {status}", code=status).response()
        return JSONResponse({"status": "ok"})

    @app.get("/version")
    async def version() -> dict:
        """trirun's version."""
        return {"version": __version__}

    @app.get("/metrics", response_model=None)
    async def prometheus() -> Response:
        """Metrics in Prometheus's text format."""
        return Response(service.metrics.render(), headers={"Content-Type": metrics.CONTENT_TYPE})

    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> dict:
        """Token ids of a text of any length, or of a conversation as the model reads it."""
        tokenizer = service.model.tokenizer
        body.check_fields()
        if body.prompt is None:
            ids = await tokenizer.render(body.messages or [], body)
        else:
            ids = await tokenizer.encode(body.prompt, special=body.add_special_tokens, param="prompt", fits=False)
        return {"tokens": ids, "count": len(ids), "max_model_len": tokenizer.context}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> dict:
        """The text of token ids."""
        return {"prompt": await service.model.tokenizer.detokenize(body.tokens)}

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> dict:
        """The tokenizer's special tokens and chat template, for clients that use it through /tokenize."""
        return service.model.tokenizer.facts

    @app.get("/docs", include_in_schema=False, response_model=None)
    async def docs() -> Response:
        return HTMLResponse(docs_page.render(app.openapi()))
