"""Metrics for Prometheus: those that mean what vLLM's mean have its names (``vllm:``), others ``trirun:``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from ...engine.engine import Engine

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Between two looks at the event loop; a shorter block may go unseen.
_LOOK_S = 0.01
_MILLISECONDS = (0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_LONG = (0.05, 0.1, 0.25, 0.5, 1, 2.5)
_COUNTS = tuple(2**power for power in range(18))


# What ends in _total counts on over the unloading of a model.
_OF_ENGINES = (
    (GaugeMetricFamily, "num_requests_running", "Choices in a slot.", "running"),
    (GaugeMetricFamily, "num_requests_waiting", "Choices waiting for a slot.", "waiting"),
    (GaugeMetricFamily, "kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.", "cache_usage"),
    (CounterMetricFamily, "prompt_tokens", "Prompt tokens of choices that got a slot.", "prompt_tokens"),
    (CounterMetricFamily, "prefix_cache_queries", "Prompt tokens looked up in the cache.", "prompt_tokens"),
    (CounterMetricFamily, "prefix_cache_hits", "Prompt tokens found in the cache.", "reused_tokens"),
    (CounterMetricFamily, "generation_tokens", "Tokens generated.", "generated_tokens"),
    (CounterMetricFamily, "num_preemptions", "Choices preempted because the KV cache was full.", "preemptions"),
)


class Metrics:
    """The metrics of one server, which have the model's served name as a label, and ``process_*`` of its process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(_EngineMetrics(self))
        ProcessCollector(registry=self.registry)
        self.models: dict[str, ModelMetrics] = {}

        def metric(kind: Any, name: str, text: str, *labels: str, **options: Any) -> Any:
            return kind(f"vllm:{name}", text, ["model_name", *labels], registry=self.registry, **options)

        config = ["model_name", "max_num_seqs", "max_model_len", "max_num_seqs_reason"]
        about = "How the server is set up, in the labels."
        self.config = Gauge("trirun:config_info", about, config, registry=self.registry)
        about = "How much later than due the event loop runs what is due: every connection waits for it."
        self.loop_delay = Histogram(
            "trirun:event_loop_delay_seconds", about, registry=self.registry, buckets=(0.005, 0.01, 0.025, *_LONG)
        )
        about = "The longest delay of the event loop since the start."
        self.loop_worst = Gauge("trirun:event_loop_delay_max_seconds", about, registry=self.registry)
        about = "The most processor time that its thread took in such a delay, the rest being the machine's."
        self.loop_busiest = Gauge("trirun:event_loop_busy_max_seconds", about, registry=self.registry)
        self.ended = metric(Counter, "request_success", "Choices ended, by reason.", "finished_reason")
        self.first = metric(Histogram, "time_to_first_token_seconds", "Arrival to first token.", buckets=_SECONDS)
        fine = tuple(ms / 1e3 for ms in _MILLISECONDS)
        self.between = metric(Histogram, "inter_token_latency_seconds", "Token to next token.", buckets=fine)
        self.latency = metric(Histogram, "e2e_request_latency_seconds", "Arrival to end.", buckets=_SECONDS)
        self.queued = metric(Histogram, "request_queue_time_seconds", "Arrival to slot.", buckets=_SECONDS)
        self.prompts = metric(Histogram, "request_prompt_tokens", "Prompt tokens of a choice.", buckets=_COUNTS)
        self.lengths = metric(Histogram, "request_generation_tokens", "Tokens of a choice.", buckets=_COUNTS)

    def add(self, model: str, engine: Callable[[], Engine | None]) -> None:
        """Add a model.

        Args:
            model: its served name. engine: returns its engine, or None while it is not loaded; called whenever the
                metrics are read.
        """
        self.models[model] = ModelMetrics(self, model, engine)

    def of(self, model: str) -> ModelMetrics:
        """The metrics of a model that was added."""
        return self.models[model]

    async def watch_loop(self) -> None:
        """Measure the event loop's delay until cancelled."""
        worst = busiest = 0.0
        while True:
            due, spent = time.perf_counter() + _LOOK_S, time.thread_time()
            await asyncio.sleep(_LOOK_S)
            delay, spent = max(time.perf_counter() - due, 0.0), time.thread_time() - spent
            self.loop_delay.observe(delay)
            worst, busiest = max(worst, delay), max(busiest, min(delay, spent))
            self.loop_worst.set(worst)
            self.loop_busiest.set(busiest)

    def render(self) -> bytes:
        """Every metric in Prometheus's text format."""
        return generate_latest(self.registry)


class ModelMetrics:
    """The metrics of one model; arguments as of :meth:`Metrics.add`."""

    def __init__(self, all_models: Metrics, model: str, engine: Callable[[], Engine | None]) -> None:
        self.model, self._all, self._engine = model, all_models, engine
        self._before: dict[str, float] = {}
        self._first, self._between = all_models.first.labels(model), all_models.between.labels(model)
        self._latency, self._queued = all_models.latency.labels(model), all_models.queued.labels(model)
        self._prompts, self._lengths = all_models.prompts.labels(model), all_models.lengths.labels(model)

    def configured(self, slots: int, context: int, why_slots: str) -> None:
        """Show how the model is set up: requests at once, tokens of each, and why so many requests."""
        self._all.config.labels(self.model, str(slots), str(context), why_slots).set(1)

    def unloaded(self, engine: Engine) -> None:
        """Keep the counts of an engine that is about to be closed."""
        for kind, _, _, attribute in _OF_ENGINES:
            if kind is CounterMetricFamily:
                self._before[attribute] = self._before.get(attribute, 0) + getattr(engine.stats, attribute)

    def engine_value(self, attribute: str) -> float:
        """A number of the engine's statistics, those of engines before it counted in."""
        engine = self._engine()
        now = 0 if engine is None else getattr(engine.stats, attribute)
        return float(self._before.get(attribute, 0) + now)

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
        self._all.ended.labels(self.model, reason).inc()

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


class _EngineMetrics:
    """The engines' own counters, read when Prometheus asks."""

    def __init__(self, all_models: Metrics) -> None:
        self._all = all_models

    def collect(self) -> Iterator[Metric]:
        for kind, name, text, attribute in _OF_ENGINES:
            family = kind(f"vllm:{name}", text, labels=["model_name"])
            for model in self._all.models.values():
                family.add_metric([model.model], model.engine_value(attribute))
            yield family
