"""Traces: a span per request, with the attributes of OpenTelemetry's conventions; nothing where it is not installed."""

import asyncio
import sys
from contextlib import contextmanager

import pytest

pytest.importorskip("opentelemetry", reason="needs opentelemetry-api")

from opentelemetry import trace

from trirun_cli.errors import MissingError
from trirun_cli.server.operations.tracing import Tracing, exporter_to

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3, "temperature": 0.5}


class Recorded(trace.Span):
    """A span that keeps what it is told."""

    def __init__(self, name, parent):
        self.name, self.parent, self.attributes, self.status, self.ended = name, parent, {}, None, False
        known = trace.get_current_span(parent).get_span_context() if parent else trace.INVALID_SPAN_CONTEXT
        self._context = trace.SpanContext(known.trace_id or 7, 9, is_remote=False)

    def get_span_context(self):
        return self._context

    def set_attributes(self, attributes):
        self.attributes |= attributes

    def set_attribute(self, key, value):
        self.attributes[key] = value

    def add_event(self, *args, **kwargs):
        pass

    def update_name(self, name):
        self.name = name

    def is_recording(self):
        return True

    def set_status(self, status, description=None):
        self.status = status.status_code

    def record_exception(self, *args, **kwargs):
        pass

    def end(self, end_time=None):
        self.ended = True


class Provider(trace.TracerProvider, trace.Tracer):
    """Keeps its spans."""

    def __init__(self):
        self.spans = []

    def get_tracer(self, *args, **kwargs):
        return self

    def start_span(self, name, context=None, kind=trace.SpanKind.INTERNAL, *args, **kwargs):
        self.spans.append(Recorded(name, context))
        return self.spans[-1]

    @contextmanager
    def start_as_current_span(self, name, context=None, kind=trace.SpanKind.INTERNAL, *args, **kwargs):
        span = self.start_span(name, context, kind)
        yield span
        span.end()


def spans_of(site, calls):
    provider = Provider()

    async def scenario():
        async with site(tracing=Tracing(provider)) as demo:
            for method, path, body, headers in calls:
                await demo.client.request(method, path, json=body, headers=headers)

    asyncio.run(scenario())
    return provider.spans


def test_a_request_is_a_span_with_the_conventions_names(site):
    (span,) = spans_of(site, [("POST", "/v1/chat/completions", CHAT, {"traceparent": PARENT, "X-Request-Id": "abc"})])
    assert span.name == "chat demo" and span.ended and span.status is None
    assert span.get_span_context().trace_id == 0x0AF7651916CD43DD8448EB211C80319C
    expected = {
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "trirun",
        "gen_ai.request.id": "abc",
        "gen_ai.request.model": "demo",
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.response.finish_reasons": ["length"],
    }
    assert {name: span.attributes[name] for name in expected} == expected
    assert span.attributes["gen_ai.usage.input_tokens"] > 0
    assert 0 < span.attributes["gen_ai.latency.time_to_first_token"] <= span.attributes["gen_ai.latency.e2e"]


def test_streams_errors_and_health(site):
    calls = [
        ("GET", "/health", None, {}),
        ("POST", "/v1/completions", {"prompt": "x", "stream": True}, {}),
        ("POST", "/v1/completions", {"prompt": 5}, {}),
        ("GET", "/v1/models", None, {}),
    ]
    streamed, refused, models = spans_of(site, calls)
    assert streamed.name == "text_completion demo" and streamed.attributes["gen_ai.usage.output_tokens"] > 0
    assert refused.attributes["error.type"] == "400" and "gen_ai.usage.input_tokens" not in refused.attributes
    assert models.name == "GET" and "gen_ai.operation.name" not in models.attributes


def test_without_the_library_nothing_is_traced(site, monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with Tracing().span({"headers": [], "path": "/", "state": {}}) as span:
        assert span is None


def test_a_missing_exporter_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter", None)
    with pytest.raises(MissingError, match=r"--otlp-traces-endpoint needs opentelemetry\.exporter") as caught:
        exporter_to("http://localhost:4318/v1/traces")
    assert "opentelemetry-sdk" in str(caught.value.fix)
