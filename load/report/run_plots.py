"""The picture of one run: how latencies are distributed, and every request over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from penstock.load.client.records import StreamRecord
from penstock.load.plotting import BLUE, GREY, ORANGE, SKY, new_figure
from penstock.load.report.axes import make_log
from penstock.load.report.summary import (
    Quantiles,
    Summary,
    itls_ms,
    num_output_tokens,
    ttft_ms,
)
from penstock.load.workloads.driver import RunResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NUM_BINS = 60
_LOG_FROM = 20.0  # times that the largest is the smallest: then bins grow with it
_MAX_SPREAD = 1000.0  # what is still smaller is drawn with the smallest
_MAX_BARS = 400
_NUM_SLICES = 120  # of the run, for rates over time


def draw_run(result: RunResult, summary: Summary, *, title: str, path: Path) -> None:
    """Draw a run and write the picture.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    figure = new_figure(13, 10)
    figure.suptitle(
        f"{title}\n{summary.output_tokens_per_s:,.0f} output tokens/s, "
        f"{summary.requests_per_s:,.1f} requests/s",
        x=0.01,
        ha="left",
        size=12,
    )
    grid = figure.add_gridspec(3, 2, height_ratios=(1, 1.5, 0.8))
    timed = [record for record in result.records if record.is_clean and record.event_times_s]
    _draw_distribution(
        figure.add_subplot(grid[0, 0]),
        [ttft_ms(record) for record in timed],
        summary.ttft_ms,
        title="Time to first token",
        of="requests",
    )
    _draw_distribution(
        figure.add_subplot(grid[0, 1]),
        [gap for record in timed for gap in itls_ms(record)],
        summary.itl_ms,
        title="Inter-token latency",
        of="gaps",
    )
    timeline = figure.add_subplot(grid[1, :])
    _draw_timeline(timeline, result)
    rates = figure.add_subplot(grid[2, :], sharex=timeline)
    _draw_rates(rates, timed, result)
    figure.savefig(path, dpi=150)


def _draw_distribution(
    axes: Axes, values_ms: Sequence[float], quantiles: Quantiles, *, title: str, of: str
) -> None:
    axes.set_title(title)
    axes.set_xlabel("ms")
    axes.set_ylabel(f"{of}, of {len(values_ms):,}")
    if not values_ms:
        return
    high = max(values_ms)
    low = max(min(values_ms), high / _MAX_SPREAD)
    is_log = high > _LOG_FROM * low
    spaced = np.geomspace if is_log else np.linspace
    axes.hist(np.maximum(values_ms, low), spaced(low, high, _NUM_BINS + 1).tolist(), color=SKY)
    if is_log:
        make_log(axes, "x")
    for name, value, style in (
        ("p50", quantiles.p50, "-"),
        ("p90", quantiles.p90, "--"),
        ("p99", quantiles.p99, ":"),
    ):
        axes.axvline(
            value, color=ORANGE, linestyle=style, linewidth=1.2, label=f"{name} {value:,.1f} ms"
        )
    axes.legend(
        loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, handlelength=1.2, columnspacing=1.0
    )


def _draw_timeline(axes: Axes, result: RunResult) -> None:
    """One bar a request, the first on top."""
    every = -(-len(result.records) // _MAX_BARS)
    shown = sorted(result.records, key=lambda record: record.scheduled_s)[::every]
    rows = np.arange(len(shown))
    due_s, sent_s, first_s, last_s = (
        np.array([_moments(record) for record in shown] or np.empty((0, 4))).T - result.began_s
    )
    for begin_s, end_s, label, colour in (
        (due_s, sent_s, "due, not sent", GREY),
        (sent_s, first_s, "until the first token", ORANGE),
        (first_s, last_s, "until the last token", BLUE),
    ):
        axes.barh(rows, end_s - begin_s, 1.0, left=begin_s, color=colour, label=label, linewidth=0)
    failed = [row for row, record in enumerate(shown) if not record.is_clean]
    if failed:
        axes.plot(last_s[failed], failed, "kx", markersize=4, label="ended by a fault")
    axes.set_title("Requests over time" + (f" (one in {every})" if every > 1 else ""))
    axes.set_ylabel("request, by time due")
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.set_xlim(0, result.duration_s)
    axes.tick_params(labelbottom=False)
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=4)


def _draw_rates(axes: Axes, timed: Sequence[StreamRecord], result: RunResult) -> None:
    """Output tokens per second and requests in flight, in slices of the run."""
    edges_s = np.linspace(0, result.duration_s, _NUM_SLICES + 1)
    middles_s = (edges_s[1:] + edges_s[:-1]) / 2
    times_s = [time_s - result.began_s for record in timed for time_s in record.event_times_s]
    weights = [
        num_output_tokens(record) / len(record.event_times_s)
        for record in timed
        for _ in record.event_times_s
    ]
    tokens, _ = np.histogram(times_s, edges_s, weights=weights)
    rates = tokens / np.diff(edges_s)
    axes.fill_between(middles_s, rates, color=SKY, linewidth=0, step="mid")
    axes.set_title("Output tokens per second, and requests in flight")
    axes.set_ylabel("tokens/s")
    axes.set_xlabel("s")
    axes.set_ylim(bottom=0)
    in_flight = axes.twinx()
    sent_s = np.sort([record.sent_s - result.began_s for record in result.records])
    ended_s = np.sort([record.ended_s - result.began_s for record in result.records])
    nums = np.searchsorted(sent_s, middles_s) - np.searchsorted(ended_s, middles_s)
    in_flight.plot(middles_s, nums, color=ORANGE, drawstyle="steps-mid")
    in_flight.set_ylabel("in flight", color=ORANGE)
    in_flight.set_ylim(bottom=0)
    in_flight.spines["right"].set_visible(True)


def _moments(record: StreamRecord) -> tuple[float, float, float, float]:
    """Due, sent, first token and last token; a fault's time where there was none."""
    first_s, last_s = (
        (record.event_times_s[0], record.event_times_s[-1])
        if record.event_times_s
        else (record.ended_s, record.ended_s)
    )
    return record.scheduled_s, record.sent_s, first_s, last_s
