"""Errors in the form of OpenAI's API: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from .dialects.other_paths import OTHER_PATHS

# OpenAI's ``type`` of each status; other 4xx are invalid requests, other 5xx server errors.
_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}

# Paths of Anthropic's API, and its own types.
ANTHROPIC = "/v1/messages"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class Fault(BaseModel):
    """What is wrong with a request."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorDocument(BaseModel):
    """The body of a refusal."""

    error: Fault


class AnthropicFault(BaseModel):
    """What is wrong with a request of Anthropic's API."""

    type: str
    message: str


class AnthropicErrorDocument(BaseModel):
    """The body of a refusal of Anthropic's API."""

    type: Literal["error"]
    error: AnthropicFault


def refusals(document: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """The responses of a route besides its answer, for the OpenAPI document."""
    told = {"4XX": "The request is refused.", "5XX": "The server cannot answer now, or never."}
    return {status: {"model": document, "description": text} for status, text in told.items()}


# Of routes whose answer may be a stream of events.
STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}


class ApiError(Exception):
    """Ends a request with an HTTP status and OpenAI's error body.

    Args:
        status: the HTTP status. message: one sentence for a person.
        param: the invalid field, such as ``messages[0].content``. code: a word for programs.
        headers: of the response, such as Retry-After.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The error document."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def anthropic_body(self) -> dict[str, Any]:
        """The error document of Anthropic's API."""
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": str(self)}}

    def response(self, path: str = "") -> JSONResponse:
        """The HTTP response, in the form of the API that the path belongs to."""
        body = self.anthropic_body if path.startswith(ANTHROPIC) else self.body
        return JSONResponse(body, self.status, headers=self.headers)


def install(app: FastAPI) -> None:
    """Answer every error of an application in this form: its own, the router's and the validator's."""

    @app.exception_handler(ApiError)
    async def known(request: Request, error: ApiError) -> JSONResponse:
        return error.response(request.url.path)

    @app.exception_handler(HTTPException)
    async def routed(request: Request, error: HTTPException) -> JSONResponse:
        where = f"{request.method} {request.url.path[:200]}"
        if error.status_code == 404 and (reason := OTHER_PATHS.get(request.url.path.rstrip("/"))):
            message = f"{request.url.path} is not supported by this server: {reason}"
            return ApiError(404, message, code="unsupported_endpoint").response()
        message = {404: f"there is no {where}", 405: f"{where} is not allowed"}.get(error.status_code, error.detail)
        return ApiError(error.status_code, message, headers=error.headers).response(request.url.path)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return _validation_error(request, error.errors()).response(request.url.path)

    @app.exception_handler(ValidationError)
    async def translated(request: Request, error: ValidationError) -> JSONResponse:
        # Of one API's body written as another's, which may have more messages or longer ones than it.
        found = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
        return _validation_error(request, found).response(request.url.path)


def _validation_error(request: Request, errors: Sequence[Mapping[str, Any]]) -> ApiError:
    first = errors[0]
    path = list(first["loc"][1:])
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first['ctx']['error']} at character {path[0]}")
    if not path:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and not kind.endswith("+json"):
            return ApiError(415, "the body must be JSON, sent with Content-Type: application/json")
        return ApiError(400, "the body must be a JSON object")
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
    if first["type"] == "missing":
        return ApiError(400, f"{param} is required", param=param, code="missing_required_parameter")
    # pydantic puts this before the message of a ValueError.
    reason = first["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{param}: {reason[:1].lower() + reason[1:]}", param=param, code="invalid_value")
