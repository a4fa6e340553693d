"""Traces: a span per request, by OpenTelemetry where that is installed.

The names of attributes are those of its conventions for generative AI (``gen_ai.*``), and vLLM's where it has none
(``gen_ai.latency.*``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from starlette.types import Scope

from ...errors import MissingError
from .logs import request_facts

if TYPE_CHECKING:
    from opentelemetry.trace import Span, TracerProvider

# What a path does, in the conventions' words.
OPERATIONS = {
    "/v1/completions": "text_completion",
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/embeddings": "embeddings",
}


class Tracing:
    """Makes the spans of requests.

    Args:
        provider: of OpenTelemetry; None is the process', which ``opentelemetry-instrument`` sets up.
    """

    def __init__(self, provider: TracerProvider | None = None) -> None:
        try:
            from opentelemetry import trace
        except ModuleNotFoundError:
            self._tracer = None
            return
        self._tracer = trace.get_tracer("trirun", tracer_provider=provider)

    @contextmanager
    def span(self, scope: Scope) -> Iterator[Span | None]:
        """The span of a request, a child of what its headers ``traceparent`` and ``tracestate`` name; None where nobody
        traces. The request's state gets its "trace_id"."""
        if self._tracer is None:
            yield None
            return
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        parent = TraceContextTextMapPropagator().extract(headers)
        name: str = OPERATIONS.get(scope["path"]) or scope["method"]
        with self._tracer.start_as_current_span(name, parent, SpanKind.SERVER) as span:
            if not span.is_recording():
                yield None
                return
            scope["state"]["trace_id"] = f"{span.get_span_context().trace_id:032x}"
            yield span


def describe(span: Span, scope: Scope, status: int, seconds: float) -> None:
    """Give a span the attributes of its request, which has ended; arguments as of :func:`.logs.request_facts`."""
    from opentelemetry.trace import Status, StatusCode

    facts = request_facts(scope, status, seconds)
    span.set_attributes(
        {
            "http.request.method": facts["method"],
            "http.response.status_code": status,
            "url.path": facts["path"],
            "gen_ai.request.id": facts["id"],
        }
    )
    operation = OPERATIONS.get(scope["path"])
    if operation is not None:
        span.set_attributes(_generative(operation, scope["state"], facts, seconds))
    if model := scope["state"].get("model"):
        span.update_name(f"{operation or facts['method']} {model}")
    if status >= 400:
        span.set_attribute("error.type", str(status))
    if status >= 500:
        span.set_status(Status(StatusCode.ERROR))


def _generative(operation: str, state: Mapping[str, Any], facts: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    found: dict[str, Any] = {"gen_ai.operation.name": operation, "gen_ai.provider.name": "trirun"}
    if model := state.get("model"):
        found |= {"gen_ai.request.model": model, "gen_ai.response.model": model}
    if (group := state.get("group")) is None:
        return found
    params, usage = group.choices[0].request.params, group.choices[0].usage
    found |= {
        "gen_ai.request.choice.count": len(group.choices),
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": float(params.temperature),
        "gen_ai.request.top_p": float(params.top_p),
        "gen_ai.usage.input_tokens": facts["prompt"],
        "gen_ai.usage.cache_read.input_tokens": facts["cached"],
        "gen_ai.usage.output_tokens": facts["generated"],
        "gen_ai.response.finish_reasons": facts["finish"],
        "gen_ai.latency.e2e": seconds,
    }
    if group.first_token_s is not None:
        found["gen_ai.latency.time_to_first_token"] = group.first_token_s
    if usage is not None and usage.queued_s is not None:
        found["gen_ai.latency.time_in_queue"] = usage.queued_s
    return found


def exporter_to(endpoint: str) -> TracerProvider:
    """A provider that sends spans to a collector.

    Args:
        endpoint: URL that takes OTLP over HTTP, such as ``http://localhost:4318/v1/traces``.

    Raises:
        MissingError: OpenTelemetry's SDK or exporter is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider as SdkProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        fix = "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
        raise MissingError(f"--otlp-traces-endpoint needs {error.name}, which is not installed", fix) from error
    provider = SdkProvider(resource=Resource.create({"service.name": "trirun"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider
