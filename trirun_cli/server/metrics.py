"""What Prometheus may ask: vLLM's metrics by vLLM's names, with trirun's prefix."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from .request_group import Choice

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_MILLISECONDS = (0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_COUNTS = tuple(2**power for power in range(18))


class Metrics:
    """The metrics of one server.

    Args:
        model: the served name, a label of every metric.
        engine: gives the engine, or None while it is loading; asked when the metrics are.
    """

    def __init__(self, model: str, engine: Callable[[], Engine | None]) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(_EngineMetrics(model, engine))

        def metric(kind: Any, name: str, text: str, **options: Any) -> Any:
            labels = ["model_name", *options.pop("labels", ())]
            made = kind(f"trirun:{name}", text, labels, registry=self.registry, **options)
            return made if len(labels) > 1 else made.labels(model)

        self._model = model
        self._ended = metric(Counter, "request_success", "Choices ended, by reason.", labels=["finished_reason"])
        self._first = metric(Histogram, "time_to_first_token_seconds", "Arrival to first token.", buckets=_SECONDS)
        fine = tuple(ms / 1e3 for ms in _MILLISECONDS)
        self._between = metric(Histogram, "inter_token_latency_seconds", "Token to next token.", buckets=fine)
        self._whole = metric(Histogram, "e2e_request_latency_seconds", "Arrival to end.", buckets=_SECONDS)
        self._queued = metric(Histogram, "request_queue_time_seconds", "Arrival to slot.", buckets=_SECONDS)
        self._prompts = metric(Histogram, "request_prompt_tokens", "Prompt tokens of a choice.", buckets=_COUNTS)
        self._lengths = metric(Histogram, "request_generation_tokens", "Tokens of a choice.", buckets=_COUNTS)

    def tokens(self, count: int, seconds: float, *, first: bool) -> None:
        """New tokens of a choice, and the seconds since its last ones, or since its arrival for the ``first``."""
        if first:
            self._first.observe(seconds)
        else:
            self._between.observe(seconds / count)

    def ended(self, reason: str, seconds: float, choice: Choice | None = None) -> None:
        """A choice ended, ``seconds`` after its arrival; ``choice`` where it did by itself."""
        self._ended.labels(self._model, reason).inc()
        if choice is None:
            return
        self._whole.observe(seconds)
        self._lengths.observe(choice.generated)
        self._prompts.observe(len(choice.request.prompt))
        if choice.usage is not None:
            self._queued.observe(choice.usage.queued_s)

    def render(self) -> bytes:
        """All of them in Prometheus's text format."""
        return generate_latest(self.registry)


class _EngineMetrics:
    """What the engine counts itself, read when it is asked for."""

    def __init__(self, model: str, engine: Callable[[], Engine | None]) -> None:
        self._model, self._engine = model, engine

    def collect(self) -> Iterator[Metric]:
        engine = self._engine()
        stats = None if engine is None else engine.stats
        values = (
            (GaugeMetricFamily, "num_requests_running", "Choices in a slot.", "running"),
            (GaugeMetricFamily, "num_requests_waiting", "Choices waiting for a slot.", "waiting"),
            (GaugeMetricFamily, "kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.", "cache_usage"),
            (CounterMetricFamily, "prompt_tokens", "Prompt tokens of choices that got a slot.", "prompt_tokens"),
            (CounterMetricFamily, "prompt_tokens_cached", "Prompt tokens found in the cache.", "reused_tokens"),
            (CounterMetricFamily, "generation_tokens", "Tokens generated.", "generated_tokens"),
            (CounterMetricFamily, "num_preemptions", "Choices put aside for lack of room.", "preemptions"),
        )
        for kind, name, text, attribute in values:
            family = kind(f"trirun:{name}", text, labels=["model_name"])
            family.add_metric([self._model], float(getattr(stats, attribute, 0)))
            yield family
