"""A histogram for what is observed at every token: prometheus_client's takes two locks each time,
and here one thread observes and reads."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class PlainHistogram(Collector):
    """One series.

    Args:
        buckets: their upper bounds, ascending; one without a bound is added.
    """

    def __init__(
        self, name: str, text: str, *, labels: Mapping[str, str], buckets: Sequence[float]
    ) -> None:
        self._name = name
        self._text = text
        self._labels = labels
        self._bounds = tuple(buckets)
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._text, labels=list(self._labels))
        bounds = map(floatToGoString, (*self._bounds, float("inf")))
        totals = accumulate(self._counts)
        family.add_metric(
            list(self._labels.values()), list(zip(bounds, totals, strict=True)), self._sum
        )
        yield family
