"""`penstock bench serve`: latencies and throughput of a running server, as its clients see them.

It measures any OpenAI-compatible server over SSE, and a penstock server over WebSocket too. The
exit code is 1 if any stream had a fault.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
import uvloop

from penstock.load.client.records import Dialogue, StreamRecord
from penstock.load.report.options import add_report_arguments, file_stem, settings_of, slo_of
from penstock.load.report.plots import BLUE, GREY, ORANGE, SKY, make_log, new_figure
from penstock.load.report.summary import (
    Quantiles,
    Summary,
    itls_ms,
    latency_table,
    notes,
    num_output_tokens,
    rate_table,
    read_metrics,
    summarize,
    ttft_ms,
    warnings,
)
from penstock.load.report.tables import publish
from penstock.load.workloads.driver import Arrivals, ClosedLoop, RunResult
from penstock.load.workloads.measure import Measured, measure, target_of, warm_up
from penstock.load.workloads.options import (
    WARM_UP_SEED,
    add_arrival_arguments,
    add_dataset_arguments,
    add_wire_arguments,
    make_arrivals,
    make_dialogues,
    wire_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--base-url", default="http://127.0.0.1:8000", help="the server's address")
    add("--num-warmups", type=int, default=1, help="warm-up requests; with jsonl, the file's first")
    add_wire_arguments(parser)
    add_dataset_arguments(parser, num_prompts=100)
    add_arrival_arguments(parser)
    add_report_arguments(parser)
    add("--save-records", action="store_true", help="write the record of each request as JSONL")


def run(parsed: argparse.Namespace) -> int:
    """Measure; print and write the report; return 1 if any stream had a fault."""
    if parsed.plot:
        new_figure(1, 1)  # fail now, not after the run, without matplotlib
    wire, slo = wire_of(parsed), slo_of(parsed)

    def draw_dialogues(num_dialogues: int, seed: int) -> list[Dialogue]:
        return make_dialogues(parsed, wire.endpoint, num_dialogues=num_dialogues, seed=seed)

    dialogues = draw_dialogues(parsed.num_prompts, parsed.seed)
    warm_ups = draw_dialogues(parsed.num_warmups, WARM_UP_SEED) if parsed.num_warmups > 0 else []
    arrivals = make_arrivals(parsed, dialogues)
    name = parsed.label or parsed.base_url
    target = target_of(name, parsed.base_url, model=parsed.model, wire=wire)
    num_turns = sum(len(dialogue.turns) for dialogue in dialogues)
    title = (
        f"{target.name}: {target.model}, {num_turns:,} requests of {parsed.dataset}, "
        f"{_described(arrivals, parsed)}, {wire.endpoint} by {wire.transport}"
    )
    print(title)

    async def warm_up_and_measure() -> Measured:
        await warm_up(target, wire, warm_ups)
        return await measure(target, wire, dialogues, arrivals)

    measured = uvloop.run(warm_up_and_measure())
    summary, server = summarize(measured.result, slo), read_metrics(measured.metrics_texts)
    has_cap = arrivals.max_concurrency is not None
    doubts = [f"warning: {text}" for text in warnings(summary, has_cap=has_cap)]
    parts = [latency_table(summary), rate_table(summary), notes(summary, server), *doubts]
    stem = file_stem("serve", parsed.label)
    others = [parsed.out / f"{stem}-records.jsonl"] if parsed.save_records else []
    for path in others:
        _write_records(measured.result, path)
    data = {
        "settings": settings_of(parsed),
        "model": target.model,
        "summary": summary.to_json(),
        "server": asdict(server) if server else None,
    }
    picture = partial(draw_run, measured.result, summary, title) if parsed.plot else None
    print()
    publish(parsed.out, stem, title, "\n\n".join(parts), data, draw=picture, others=others)
    return int(summary.num_failed > 0)


def _described(arrivals: Arrivals, parsed: argparse.Namespace) -> str:
    if isinstance(arrivals, ClosedLoop):
        return f"{arrivals.max_concurrency:,} in flight"
    if parsed.ramp_from is not None:
        rate = f"{parsed.ramp_from:g} to {parsed.ramp_to:g} dialogues a second"
    elif arrivals.offsets_s[-1] == 0:
        rate = "all at once"
    else:
        rate = f"{len(arrivals.offsets_s) / arrivals.offsets_s[-1]:.3g} dialogues a second"
    cap = arrivals.max_concurrency
    return rate if cap is None else f"{rate}, at most {cap:,} in flight"


def _write_records(result: RunResult, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for record in result.records:
            file.write(orjson.dumps(_plain(record, result.began_s)) + b"\n")


def _plain(record: StreamRecord, began_s: float) -> dict[str, Any]:
    """A record with its times relative to the start of the run."""
    plain = asdict(record)
    for name in ("scheduled_s", "sent_s", "ended_s"):
        plain[name] -= began_s
    plain["event_times_s"] = [time_s - began_s for time_s in record.event_times_s]
    return plain


# -- the picture --------------------------------------------------------------------------------

_NUM_BINS = 60
_LOG_FROM = 20.0  # times that the largest is the smallest: then bins grow with it
_MAX_SPREAD = 1000.0  # what is still smaller is drawn with the smallest
_MAX_BARS = 400
_NUM_SLICES = 120  # of the run, for rates over time


def draw_run(result: RunResult, summary: Summary, title: str, path: Path) -> None:
    """Draw a run and write the picture. Raises ConfigError if matplotlib is not installed."""
    figure = new_figure(13, 10)
    tokens, requests = summary.output_tokens_per_s, summary.requests_per_s
    rates = f"{tokens:,.0f} output tokens/s, {requests:,.1f} requests/s"
    figure.suptitle(f"{title}\n{rates}", x=0.01, ha="left", size=12)
    grid = figure.add_gridspec(3, 2, height_ratios=(1, 1.5, 0.8))
    timed = [record for record in result.records if record.is_clean and record.event_times_s]
    gaps_ms = [gap for record in timed for gap in itls_ms(record)]
    left, right = (figure.add_subplot(grid[0, column]) for column in (0, 1))
    _draw_distribution(left, list(map(ttft_ms, timed)), summary.ttft_ms, of="requests")
    left.set_title("Time to first token")
    _draw_distribution(right, gaps_ms, summary.itl_ms, of="gaps")
    right.set_title("Inter-token latency")
    timeline = figure.add_subplot(grid[1, :])
    _draw_timeline(timeline, result)
    _draw_rates(figure.add_subplot(grid[2, :], sharex=timeline), timed, result)
    figure.savefig(path, dpi=150)


def _draw_distribution(
    axes: Axes, values_ms: Sequence[float], quantiles: Quantiles, *, of: str
) -> None:
    axes.set(xlabel="ms", ylabel=f"{of}, of {len(values_ms):,}")
    if not values_ms:
        return
    high = max(values_ms)
    low = max(min(values_ms), high / _MAX_SPREAD)
    is_log = high > _LOG_FROM * low
    spaced = np.geomspace if is_log else np.linspace
    axes.hist(np.maximum(values_ms, low), spaced(low, high, _NUM_BINS + 1).tolist(), color=SKY)
    if is_log:
        make_log(axes, "x")
    for name, style in {"p50": "-", "p90": "--", "p99": ":"}.items():
        value = getattr(quantiles, name)
        label = f"{name} {value:,.1f} ms"
        axes.axvline(value, color=ORANGE, linestyle=style, linewidth=1.2, label=label)
    axes.legend(
        loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, handlelength=1.2, columnspacing=1.0
    )


def _draw_timeline(axes: Axes, result: RunResult) -> None:
    """One bar per request, the first on top."""
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
    """When it was due, sent, had its first and its last token; without a token, when it ended."""
    times_s = record.event_times_s or [record.ended_s]
    return record.scheduled_s, record.sent_s, times_s[0], times_s[-1]
