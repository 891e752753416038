"""From Prometheus texts, as servers write them, to the figures of a run."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from penstock.load.report.summary import ServerMetrics, read_metrics


def exposition(prefix: str, *, queries: int, hits: int, preemptions: int, usage: float) -> str:
    """As a server writes it, two engines' series of each."""
    registry = CollectorRegistry()
    for name, value in (
        ("prefix_cache_queries", queries),
        ("prefix_cache_hits", hits),
        ("num_preemptions", preemptions),
    ):
        counter = Counter(f"{prefix}:{name}", "text", ("engine",), registry=registry)
        for engine in "01":
            counter.labels(engine).inc(value / 2)
    Gauge(f"{prefix}:kv_cache_usage_perc", "text", registry=registry).set(usage)
    if prefix == "penstock":
        slots = Gauge("penstock:kv_slots", "text", ("state",), registry=registry)
        slots.labels("allocated").set(usage * 1000)
        slots.labels("empty").set(usage * 100)
    return generate_latest(registry).decode()


@pytest.mark.parametrize("prefix", ["penstock", "vllm"])
def test_metrics_tell_what_grew_and_what_peaked(prefix: str) -> None:
    texts = [
        exposition(prefix, queries=1000, hits=900, preemptions=10, usage=0.0),
        exposition(prefix, queries=1500, hits=950, preemptions=12, usage=0.75),
        exposition(prefix, queries=2000, hits=1100, preemptions=14, usage=0.25),
    ]
    assert read_metrics(texts) == ServerMetrics(
        prefix_cache_hit_rate=0.2,
        num_preemptions=4,
        peak_kv_usage=0.75,
        kv_waste=pytest.approx(0.1) if prefix == "penstock" else None,
    )


def test_a_server_that_says_nothing_is_left_out() -> None:
    other = "llamacpp:prompt_tokens_total 3\nprocess_cpu_seconds_total 1\n"
    for texts in ([], [other, other], ["<html>no metrics</html>"] * 2):
        assert read_metrics(texts) is None
    idle = exposition("vllm", queries=5, hits=1, preemptions=0, usage=0.0)
    assert read_metrics([idle, idle]) == ServerMetrics(num_preemptions=0, peak_kv_usage=0.0)
