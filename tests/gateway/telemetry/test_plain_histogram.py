"""A histogram that reads like prometheus_client's own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from penstock.gateway.telemetry.metrics import PlainHistogram

_BUCKETS = (0.001, 0.25, 1, 20)
_VALUES = (0.0, 0.001, 0.0011, 0.25, 0.9, 7.0, 20.0, 21.0)


def test_it_reads_like_the_library_s_own() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    plain = PlainHistogram("a:seconds", "Text.", labels={"model": "m"}, buckets=_BUCKETS)
    ours.register(plain)
    full = Histogram("a:seconds", "Text.", ("model",), registry=theirs, buckets=_BUCKETS)
    for value in _VALUES:
        plain.observe(value)
        full.labels("m").observe(value)
    assert _lines(ours) == _lines(theirs)


def _lines(registry: CollectorRegistry) -> list[str]:
    """Without the moment at which the series began."""
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if "_created" not in line]
