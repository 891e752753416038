"""Prometheus metrics under vLLM's names with the prefix `penstock:`, in a registry of our own.

What a stream lived through is observed once per frame, by the stream's own `StreamMeter`. What the
engine knows of itself is `engine_metrics`' to tell.
"""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from penstock.gateway.engine_client import EngineClient
from penstock.gateway.engine_metrics import EngineCollector
from penstock.gateway.plain_histogram import PlainHistogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LABELS = ("model_name",)
_TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80)
_ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.4, 0.8, 2, 5)
_E2E_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600)


class Metrics:
    """All metrics of one gateway.

    Args:
        model_name: the label of every series.
    """

    def __init__(self, engine: EngineClient, model_name: str) -> None:
        self._model_name = model_name
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(engine, model_name))
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens processed.")
        self.generation_tokens = self._counter(
            "generation_tokens", "Tokens generated and delivered."
        )
        self._finished = Counter(
            "penstock:request_success",
            "Finished requests.",
            (*_LABELS, "finished_reason"),
            registry=self._registry,
        )
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "Arrival to first token.", buckets=_TTFT_BUCKETS
        )
        self.inter_token_latency = PlainHistogram(
            "penstock:inter_token_latency_seconds",
            "Time per token after the first.",
            labels={"model_name": model_name},
            buckets=_ITL_BUCKETS,
        )
        self._registry.register(self.inter_token_latency)
        self.e2e_request_latency = self._histogram(
            "e2e_request_latency_seconds", "Arrival to last token.", buckets=_E2E_BUCKETS
        )

    def count_finished(self, reason: str) -> None:
        self._finished.labels(self._model_name, reason).inc()

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str) -> Counter:
        counter = Counter(f"penstock:{name}", text, _LABELS, registry=self._registry)
        return counter.labels(self._model_name)

    def _histogram(self, name: str, text: str, *, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(
            f"penstock:{name}", text, _LABELS, registry=self._registry, buckets=buckets
        )
        return histogram.labels(self._model_name)


class StreamMeter:
    """One request's observations: a clock read and at most one histogram per output."""

    __slots__ = ("_arrival_s", "_has_prompt", "_last_s", "_metrics")

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._arrival_s = time.perf_counter()
        self._has_prompt = False
        self._last_s: dict[int, float] = {}  # by branch

    def output(self, index: int, *, num_tokens: int, num_prompt_tokens: int) -> None:
        """A branch's next tokens came; the prompt is counted with the first output."""
        if not self._has_prompt:
            self._has_prompt = True
            self._metrics.prompt_tokens.inc(num_prompt_tokens)
        if num_tokens == 0:
            return
        now = time.perf_counter()
        last_s = self._last_s.get(index)
        if last_s is not None:
            self._metrics.inter_token_latency.observe((now - last_s) / num_tokens)
        elif not self._last_s:
            self._metrics.time_to_first_token.observe(now - self._arrival_s)
        self._metrics.generation_tokens.inc(num_tokens)
        self._last_s[index] = now

    def finished(self, reason: str) -> None:
        self._metrics.count_finished(reason)
        self._metrics.e2e_request_latency.observe(time.perf_counter() - self._arrival_s)
