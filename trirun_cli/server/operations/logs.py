"""What the server writes to stderr: lines for people, or JSON documents, one a line."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Literal

from starlette.types import Scope

from ..request_group import RequestGroup

# A line per request, where its level is INFO.
request_log = logging.getLogger("trirun.requests")

LogFormat = Literal["text", "json"]


class JsonFormatter(logging.Formatter):
    """A record as a JSON document: "time" (UTC), "level", "logger", "message", "exception", and its own "facts"."""

    def format(self, record: logging.LogRecord) -> str:
        """The document."""
        document: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            document["exception"] = self.formatException(record.exc_info)
        return json.dumps(document, ensure_ascii=False)


def set_up_logging(log_requests: bool, log_format: LogFormat = "text") -> None:
    """Write the log of the server and of uvicorn to stderr.

    Args:
        log_requests: also a line per request, and one when a model is loaded or unloaded.
    """
    handler = logging.StreamHandler(sys.stderr)
    # Requests are cancelled only when the server stops, and their clients are told.
    handler.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError)))
    text = logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S")
    handler.setFormatter(JsonFormatter() if log_format == "json" else text)
    for name in ("trirun", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.WARNING)
    if log_requests:
        request_log.setLevel(logging.INFO)
        # Models that are loaded and unloaded.
        logging.getLogger("trirun.server").setLevel(logging.INFO)


def log_request(scope: Scope, status: int, seconds: float) -> None:
    """Log a request that has ended, where requests are logged; arguments as of :func:`request_facts`."""
    if request_log.isEnabledFor(logging.INFO):
        facts = request_facts(scope, status, seconds)
        request_log.info("%s", request_line(facts), extra={"facts": facts})


def request_facts(scope: Scope, status: int, seconds: float) -> dict[str, Any]:
    """What the log says of a request: who, what, its status, its tokens, its times in milliseconds, its ids.

    Args:
        scope: of the request. Where it has generated, its state has the "group"; where it is traced, the "trace_id".
        status: of the response; 499 where the client left before it. seconds: from the request to the response's end.
    """
    state, client = scope["state"], scope.get("client")
    # Only the path: a query may hold what no log should.
    path = scope["path"][:200].encode("unicode_escape").decode()
    facts: dict[str, Any] = {"client": client[0] if client else "-", "method": scope["method"], "path": path}
    facts["status"] = status
    group: RequestGroup | None = state.get("group")
    if group is not None:
        counts = group.token_counts
        facts |= {"prompt": counts.prompt, "cached": counts.cached, "generated": counts.generated}
        facts["finish"] = group.finishes
        if group.first_token_s is not None:
            facts["first_ms"] = round(group.first_token_s * 1e3)
    facts |= {"total_ms": round(seconds * 1e3), "id": state["request_id"]}
    return facts | ({"trace": state["trace_id"]} if "trace_id" in state else {})


def request_line(facts: dict[str, Any]) -> str:
    """The facts of a request in a line."""
    shown = [str(facts[name]) for name in ("client", "method", "path", "status")]
    for name, value in facts.items():
        if name.endswith("_ms"):
            shown.append(f"{name.removesuffix('_ms')}={value}ms")
        elif name in ("prompt", "cached", "generated", "id", "trace"):
            shown.append(f"{name}={value}")
        elif name == "finish":
            shown.append(f"finish={','.join(value)}")
    return " ".join(shown)
