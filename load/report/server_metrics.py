"""What a server's metrics say of a run: from Prometheus texts to a few figures.

    penstock: or vllm:   prefix_cache_queries_total, prefix_cache_hits_total,
                         num_preemptions_total, kv_cache_usage_perc
    penstock:            kv_slots{state="allocated"|"empty"}

A server without one of them has no such figure. Knows no server and no run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from prometheus_client.parser import text_string_to_metric_families

Sample: TypeAlias = Mapping[str, float]  # values by name without its prefix, with a state if any

_PREFIXES = ("penstock:", "vllm:")
_USAGE = "kv_cache_usage_perc"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerMetrics:
    """Of one run; None: the server does not say.

    Attributes:
        prefix_cache_hit_rate: prompt tokens found ÷ looked up.
        peak_kv_usage: the largest share of KV blocks in use in any sample.
        kv_waste: empty ÷ allocated token slots of running sequences, over all samples.
    """

    prefix_cache_hit_rate: float | None = None
    num_preemptions: int | None = None
    peak_kv_usage: float | None = None
    kv_waste: float | None = None


def read_metrics(texts: Sequence[str]) -> ServerMetrics | None:
    """The figures of a run from the metrics before, during and after; None if there are none."""
    samples = [_sample(text) for text in texts]
    if not any(samples):
        return None
    first, last = samples[0], samples[-1]
    queries = _growth("prefix_cache_queries_total", first, last)
    hits = _growth("prefix_cache_hits_total", first, last)
    preemptions = _growth("num_preemptions_total", first, last)
    usages = [
        sample["kv_cache_usage_perc"] for sample in samples if "kv_cache_usage_perc" in sample
    ]
    allocated = sum(sample.get("kv_slots allocated", 0.0) for sample in samples)
    empty = sum(sample.get("kv_slots empty", 0.0) for sample in samples)
    return ServerMetrics(
        prefix_cache_hit_rate=hits / queries if hits is not None and queries else None,
        num_preemptions=None if preemptions is None else round(preemptions),
        peak_kv_usage=max(usages, default=None),
        kv_waste=empty / allocated if allocated else None,
    )


def _sample(text: str) -> Sample:
    """All series under one name, and state, are one: their sum. Empty for what is no such text."""
    values: defaultdict[str, float] = defaultdict(float)
    try:
        families = list(text_string_to_metric_families(text))
    except ValueError:
        return {}
    for sample in (sample for family in families for sample in family.samples):
        prefix = next((known for known in _PREFIXES if sample.name.startswith(known)), None)
        if prefix is not None:
            name = sample.name.removeprefix(prefix)
            values[f"{name} {sample.labels.get('state', '')}".strip()] += sample.value
    return values


def _growth(name: str, first: Sample, last: Sample) -> float | None:
    return last[name] - first[name] if name in first and name in last else None
