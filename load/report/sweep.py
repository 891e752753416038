"""Servers' figures by load: curves, when one is saturated, and their table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.load.report.summary import Summary
from penstock.load.tables import table

_WORSE = 1.2  # times the median E2E latency of the load before
_HEADER = (
    "server", "load", "tokens/s", "spread", "requests/s", "TTFT p50", "p99", "ITL p50", "p99",
    "E2E p50", "p99", "good", "faults",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Point:
    """One load.

    Attributes:
        load: dialogues in flight, or a second.
        runs: one or more, the same but for their prompts.
    """

    load: float
    runs: Sequence[Summary]

    @property
    def summary(self) -> Summary:
        """The run of median throughput; of an even number, the lower of the two."""
        ordered = sorted(self.runs, key=lambda run: run.output_tokens_per_s)
        return ordered[(len(ordered) - 1) // 2]


@dataclass(frozen=True, slots=True)
class Curve:
    """One server, by ascending load."""

    name: str
    points: Sequence[Point]

    @property
    def best(self) -> Point:
        return max(self.points, key=lambda point: point.summary.output_tokens_per_s)

    def is_saturated(self, *, min_gain: float) -> bool:
        """Whether more load gives no more tokens, only more waiting.

        That is: at the last load, output tokens per second grew by less than `min_gain` over the
        best load before, and the median E2E latency is at least 1.2 times the one before. A load
        at which nothing was completed is too much in any case.
        """
        if not self.points or not self.points[-1].summary.num_completed:
            return bool(self.points)
        if len(self.points) < 2:
            return False
        before, last = self.points[-2].summary, self.points[-1].summary
        best = max(point.summary.output_tokens_per_s for point in self.points[:-1])
        has_gained = last.output_tokens_per_s >= (1.0 + min_gain) * best
        return not has_gained and last.e2e_ms.p50 >= _WORSE * before.e2e_ms.p50


def sweep_table(curves: Sequence[Curve]) -> str:
    """All points, and what the columns mean."""
    rows = [_row(curve.name, point) for curve in curves for point in curve.points]
    return f"{table(_HEADER, rows)}\n\n{_NOTES}"


_NOTES = """\
load: as in the title. tokens/s: output tokens, of the run of median throughput, as all figures.
spread: of tokens/s over all runs of this load, highest ÷ lowest. Latencies in ms, from when a
request was due. good: share of all requests that kept to the objectives."""


def verdicts(curves: Sequence[Curve]) -> str:
    """The best load of each server, a line each."""
    return "\n".join(
        f"- {curve.name}: at most {curve.best.summary.output_tokens_per_s:,.0f} output tokens/s, "
        f"at a load of {curve.best.load:g}"
        for curve in curves
    )


def figures(curves: Sequence[Curve]) -> list[dict[str, Any]]:
    """The curves as plain data, every run among them."""
    return [
        {
            "server": curve.name,
            "points": [
                {"load": point.load, "runs": [run.to_json() for run in point.runs]}
                for point in curve.points
            ],
        }
        for curve in curves
    ]


def _row(name: str, point: Point) -> list[str]:
    summary = point.summary
    rates = [run.output_tokens_per_s for run in point.runs]
    return [
        name,
        f"{point.load:g}",
        f"{summary.output_tokens_per_s:,.0f}",
        f"{max(rates) / min(rates):.2f}" if min(rates) > 0 else "–",
        f"{summary.requests_per_s:,.2f}",
        f"{summary.ttft_ms.p50:,.1f}",
        f"{summary.ttft_ms.p99:,.1f}",
        f"{summary.itl_ms.p50:,.1f}",
        f"{summary.itl_ms.p99:,.1f}",
        f"{summary.e2e_ms.p50:,.0f}",
        f"{summary.e2e_ms.p99:,.0f}",
        f"{summary.goodput.share:.0%}" if summary.goodput else "–",
        f"{sum(run.num_failed for run in point.runs):,}",
    ]
