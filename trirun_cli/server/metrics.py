"""Metrics for Prometheus: those of vLLM by vLLM's names, with the prefix ``trirun:``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from ..engine.engine import Engine

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_MILLISECONDS = (0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_COUNTS = tuple(2**power for power in range(18))


class Metrics:
    """The metrics of one server.

    Args:
        model: the served name, a label of every metric.
        engine: returns the engine, or None while it is loading; called whenever the metrics are read.
    """

    def __init__(self, model: str, engine: Callable[[], Engine | None]) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(_EngineMetrics(model, engine))

        def metric(kind: Any, name: str, text: str, **options: Any) -> Any:
            labels = ["model_name", *options.pop("labels", ())]
            made = kind(f"trirun:{name}", text, labels, registry=self.registry, **options)
            return made if len(labels) > 1 else made.labels(model)

        self._model = model
        config = ["max_num_seqs", "max_model_len", "max_num_seqs_reason"]
        self._config = metric(Gauge, "config_info", "How the server is set up, in the labels.", labels=config)
        self._ended = metric(Counter, "request_success", "Choices ended, by reason.", labels=["finished_reason"])
        self._first = metric(Histogram, "time_to_first_token_seconds", "Arrival to first token.", buckets=_SECONDS)
        fine = tuple(ms / 1e3 for ms in _MILLISECONDS)
        self._between = metric(Histogram, "inter_token_latency_seconds", "Token to next token.", buckets=fine)
        self._latency = metric(Histogram, "e2e_request_latency_seconds", "Arrival to end.", buckets=_SECONDS)
        self._queued = metric(Histogram, "request_queue_time_seconds", "Arrival to slot.", buckets=_SECONDS)
        self._prompts = metric(Histogram, "request_prompt_tokens", "Prompt tokens of a choice.", buckets=_COUNTS)
        self._lengths = metric(Histogram, "request_generation_tokens", "Tokens of a choice.", buckets=_COUNTS)

    def configured(self, slots: int, context: int, why_slots: str) -> None:
        """Show how the server is set up: requests at once, tokens of each, and why so many requests."""
        self._config.labels(self._model, str(slots), str(context), why_slots).set(1)

    def tokens(self, count: int, seconds: float, *, first: bool) -> None:
        """Count new tokens of a choice.

        Args:
            count: of the tokens. seconds: since the choice's previous tokens, or since its arrival for the ``first``.
        """
        if first:
            self._first.observe(seconds)
        else:
            self._between.observe(seconds / count)

    def ended(self, reason: str) -> None:
        """Count a choice that ended: "stop", "length", "abort" or "error"."""
        self._ended.labels(self._model, reason).inc()

    def completed(self, seconds: float, *, prompt_tokens: int, generated_tokens: int, queued_s: float | None) -> None:
        """Add a choice that the engine ended, not its client, to the histograms.

        Args:
            seconds: from its arrival to its end. queued_s: from its arrival to its slot, where the engine said it.
        """
        self._latency.observe(seconds)
        self._lengths.observe(generated_tokens)
        self._prompts.observe(prompt_tokens)
        if queued_s is not None:
            self._queued.observe(queued_s)

    def render(self) -> bytes:
        """Every metric in Prometheus's text format."""
        return generate_latest(self.registry)


class _EngineMetrics:
    """The engine's own counters, read when Prometheus asks."""

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
            (CounterMetricFamily, "num_preemptions", "Choices preempted because the KV cache was full.", "preemptions"),
        )
        for kind, name, text, attribute in values:
            family = kind(f"trirun:{name}", text, labels=["model_name"])
            family.add_metric([self._model], float(getattr(stats, attribute, 0)))
            yield family
