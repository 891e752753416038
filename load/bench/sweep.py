"""`penstock bench sweep`: running servers measured at one load after another, up to saturation.

A load is a number of dialogues in flight, or a rate. At each load all servers take turns (A B A B
…) with the same prompts, so that a drifting machine favours none. Each load has prompts of its own,
since a prefix cache would know repeated ones (`jsonl` only has those of its file). A saturated
server gets no higher load. The exit code is 1 if any stream had a fault.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import uvloop

from penstock.engine.errors import ConfigError
from penstock.load.client.records import Dialogue
from penstock.load.report.options import (
    add_report_arguments,
    counts,
    file_stem,
    settings_of,
    slo_of,
)
from penstock.load.report.plots import BLUE, GREEN, ORANGE, SKY, make_log, new_figure, plain
from penstock.load.report.summary import Slo, Summary, summarize, warnings
from penstock.load.report.tables import publish, table
from penstock.load.workloads.driver import Arrivals, ClosedLoop, OpenLoop, gamma_offsets
from penstock.load.workloads.measure import Target, measure, target_of, warm_up
from penstock.load.workloads.options import (
    WARM_UP_SEED,
    Wire,
    add_burstiness,
    add_dataset_arguments,
    add_wire_arguments,
    make_dialogues,
    wire_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DEFAULT_SERVER = "penstock=http://127.0.0.1:8000"
_PROMPTS_PER_STREAM = 4
_NUM_WARM_UPS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sweep")
    group.add_argument(
        "--server",
        action="append",
        metavar="NAME=URL",
        help="may be repeated; all are in one picture; default: " + _DEFAULT_SERVER,
    )
    loads = group.add_mutually_exclusive_group()
    add = loads.add_argument
    add(
        "--concurrency",
        type=counts,
        default="1,2,4,8,16,32,64,128,256",
        help="numbers of dialogues in flight, comma-separated",
    )
    add("--rates", type=rates, help="dialogues per second instead, such as 0.5,1,2")
    add_burstiness(group)
    add = group.add_argument
    add("--seconds", type=float, default=10.0, help="duration of each rate, at least")
    add(
        "--min-gain",
        type=float,
        default=0.05,
        help="a server is saturated when throughput gains less and latency grows; 0: run all loads",
    )
    add("--repeat", type=int, default=1, help="runs of each server at each load")
    add_wire_arguments(parser)
    add_dataset_arguments(parser, num_prompts=32)
    add_report_arguments(parser)


def rates(text: str) -> tuple[float, ...]:
    """Comma-separated positive numbers. Raises ValueError otherwise."""
    numbers = tuple(float(number) for number in text.split(","))
    if not all(0 < number < math.inf for number in numbers):
        raise ValueError(text)
    return numbers


def run(parsed: argparse.Namespace) -> int:
    """Sweep; print and write the report; return 1 if any stream had a fault."""
    if parsed.plot:
        new_figure(1, 1)  # fail now, not after the runs, without matplotlib
    if parsed.repeat < 1:
        raise ConfigError("--repeat must be at least 1")
    if parsed.burstiness != 1.0 and not parsed.rates:
        raise ConfigError("--burstiness needs --rates")
    wire, slo = wire_of(parsed), slo_of(parsed)
    targets = [
        target_of(name, base_url, model=parsed.model, wire=wire)
        for name, base_url in _servers(parsed.server or [_DEFAULT_SERVER]).items()
    ]
    title = (
        f"{parsed.label or 'Sweep'}: {', '.join(target.name for target in targets)} by "
        f"{'rate' if parsed.rates else 'concurrency'}, {parsed.dataset}, {wire.endpoint} by "
        f"{wire.transport}"
    )
    print(title, flush=True)
    curves = uvloop.run(_measure(parsed, targets, wire, slo))
    runs = [run for curve in curves for point in curve.points for run in point.runs]
    doubts = sorted({text for run in runs for text in warnings(run, has_cap=not parsed.rates)})
    parts = [sweep_table(curves), verdicts(curves), *(f"warning: {text}" for text in doubts)]
    report = "\n\n".join(parts)
    print()
    load_name = "dialogues a second" if parsed.rates else "dialogues in flight"
    data = {"settings": settings_of(parsed), "curves": figures(curves)}
    picture = partial(draw_sweep, curves, title, load_name) if parsed.plot else None
    publish(parsed.out, file_stem("sweep", parsed.label), title, report, data, draw=picture)
    return int(any(run.num_failed for run in runs))


def _servers(texts: Sequence[str]) -> dict[str, str]:
    servers: dict[str, str] = {}
    for text in texts:
        name, _, base_url = text.partition("=")
        if not name or not base_url or name in servers:
            raise ConfigError(f"--server {text!r}: must be NAME=URL with a unique name")
        servers[name] = base_url
    return servers


async def _measure(
    parsed: argparse.Namespace, targets: Sequence[Target], wire: Wire, slo: Slo
) -> list[Curve]:
    """All servers' curves; that of a saturated server ends early."""

    def dialogues_of(num_dialogues: int, seed: int) -> list[Dialogue]:
        return make_dialogues(parsed, wire.endpoint, num_dialogues=num_dialogues, seed=seed)

    warm_ups = dialogues_of(_NUM_WARM_UPS, WARM_UP_SEED)
    for target in targets:
        await warm_up(target, wire, warm_ups)
    points: dict[str, list[Point]] = {target.name: [] for target in targets}
    live = targets
    for index, load in enumerate(sorted(set(parsed.rates or parsed.concurrency))):
        runs: dict[str, list[Summary]] = {target.name: [] for target in live}
        # Enough dialogues for a load to last.
        enough = math.ceil(load * (parsed.seconds if parsed.rates else _PROMPTS_PER_STREAM))
        for repeat in range(parsed.repeat):
            seed = parsed.seed + index * parsed.repeat + repeat
            dialogues = dialogues_of(max(parsed.num_prompts, enough), seed)
            for target in live:
                arrivals = _arrivals(parsed, load, len(dialogues), seed)
                measured = await measure(target, wire, dialogues, arrivals)
                runs[target.name].append(summarize(measured.result, slo))
        for name in runs:
            points[name].append(Point(load, runs[name]))
            _tell(name, points[name][-1])
        if parsed.min_gain > 0:
            curves = {target.name: Curve("", points[target.name]) for target in live}
            gain: float = parsed.min_gain
            live = [each for each in live if not curves[each.name].is_saturated(min_gain=gain)]
    return [Curve(name, points[name]) for name in points]


def _arrivals(parsed: argparse.Namespace, load: float, num: int, seed: int) -> Arrivals:
    if not parsed.rates:
        return ClosedLoop(int(load))
    burstiness: float = parsed.burstiness
    return OpenLoop(gamma_offsets(num, rate=load, burstiness=burstiness, seed=seed))


def _tell(name: str, point: Point) -> None:
    """Print a progress line, since a sweep takes long."""
    summary = point.summary
    print(
        f"{name} at {point.load:g}: {summary.output_tokens_per_s:,.0f} tokens/s, TTFT "
        f"{summary.ttft_ms.p50:,.1f} ms, ITL {summary.itl_ms.p50:,.1f} ms",
        flush=True,
    )


# -- curves and their table ---------------------------------------------------------------------

_WORSE = 1.2  # times the median E2E latency of the load before
_HEADER = (
    "server", "load", "tokens/s", "spread", "requests/s", "TTFT p50", "p99", "ITL p50", "p99",
    "E2E p50", "p99", "good", "faults",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Point:
    """One load."""

    load: float  # dialogues in flight, or a second
    runs: Sequence[Summary]  # one or more, the same but for their prompts

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
        best earlier load, and the median E2E latency is at least 1.2 times that of the load before.
        A load at which nothing completed is always too much.
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
    """One line per server: its best load."""
    return "\n".join(
        f"- {curve.name}: at most {curve.best.summary.output_tokens_per_s:,.0f} output tokens/s, "
        f"at a load of {curve.best.load:g}"
        for curve in curves
    )


def figures(curves: Sequence[Curve]) -> list[dict[str, Any]]:
    """The curves with every run, as plain data."""

    def points(curve: Curve) -> list[dict[str, Any]]:
        return [{"load": p.load, "runs": [run.to_json() for run in p.runs]} for p in curve.points]

    return [{"server": curve.name, "points": points(curve)} for curve in curves]


def _row(name: str, point: Point) -> list[str]:
    summary = point.summary
    rates = [run.output_tokens_per_s for run in point.runs]
    spread = f"{max(rates) / min(rates):.2f}" if min(rates) > 0 else "–"
    latencies = (summary.ttft_ms.p50, summary.ttft_ms.p99, summary.itl_ms.p50, summary.itl_ms.p99)
    return [
        *(name, f"{point.load:g}", f"{summary.output_tokens_per_s:,.0f}", spread),
        f"{summary.requests_per_s:,.2f}",
        *(f"{latency:,.1f}" for latency in latencies),
        *(f"{latency:,.0f}" for latency in (summary.e2e_ms.p50, summary.e2e_ms.p99)),
        f"{summary.goodput.share:.0%}" if summary.goodput else "–",
        f"{sum(run.num_failed for run in point.runs):,}",
    ]


# -- the picture --------------------------------------------------------------------------------

_STYLES = tuple(
    (colour, marker) for marker in "osD^" for colour in (BLUE, ORANGE, GREEN, SKY)
)  # by server
_NAMED_FROM = 0.1  # of the best throughput


class _Panel(NamedTuple):
    """One pair of axes: what is drawn of each point."""

    title: str
    labels: tuple[str, str]  # of x and y
    x: Callable[[Point], float]
    y: Callable[[Summary], float]
    tail: Callable[[Summary], float] | None = None  # a p99, drawn dashed
    log: str = ""  # the logarithmic axes
    names_loads: bool = False


def draw_sweep(curves: Sequence[Curve], title: str, load_name: str, path: Path) -> None:
    """Draw all servers' curves; `load_name` is what a load counts. Raises ConfigError if matplotlib
    is not installed."""
    figure = new_figure(13, 9)
    figure.suptitle(title, x=0.01, ha="left", size=12)
    for place, panel in enumerate(_panels(load_name), start=1):
        axes = figure.add_subplot(2, 2, place)
        for index, curve in enumerate(curves):
            colour, marker = _STYLES[index % len(_STYLES)]
            _draw_curve(axes, curve, panel, colour, marker)
        _finish(axes, panel)
        if place == 1:
            axes.legend(loc="best")
    figure.savefig(path, dpi=150)


def _stream_speed(point: Point) -> float:
    """Tokens per second of one stream; not drawn where all tokens came at once."""
    tpot_ms = point.summary.tpot_ms.p50
    return 1e3 / tpot_ms if tpot_ms else math.nan


def _panels(load_name: str) -> tuple[_Panel, ...]:
    rate = attrgetter("output_tokens_per_s")
    return (
        _Panel(
            "Throughput by load",
            (load_name, "output tokens/s"),
            x=lambda point: point.load,
            y=rate,
            log="x",
        ),
        _Panel(
            "Throughput against speed for one user: up and to the right is better",
            ("tokens/s of one stream (1 ÷ median TPOT)", "output tokens/s of all"),
            x=_stream_speed,
            y=rate,
            names_loads=True,
        ),
        _Panel(
            "Time to first token: median, and p99 dashed",
            (load_name, "ms"),
            x=lambda point: point.load,
            y=attrgetter("ttft_ms.p50"),
            tail=attrgetter("ttft_ms.p99"),
            log="xy",
        ),
        _Panel(
            "Latency against throughput: E2E median, and p99 dashed",
            ("output tokens/s", "ms"),
            x=lambda point: point.summary.output_tokens_per_s,
            y=attrgetter("e2e_ms.p50"),
            tail=attrgetter("e2e_ms.p99"),
            log="y",
            names_loads=True,
        ),
    )


def _draw_curve(axes: Axes, curve: Curve, panel: _Panel, colour: str, marker: str) -> None:
    points = [point for point in curve.points if point.summary.num_completed]
    xs = [panel.x(point) for point in points]
    ys = [panel.y(point.summary) for point in points]
    axes.plot(xs, ys, color=colour, marker=marker, markersize=4, label=curve.name)
    if panel.tail is not None:
        tails = [panel.tail(point.summary) for point in points]
        axes.plot(xs, tails, color=colour, linestyle="--", linewidth=1)
    named_from = _NAMED_FROM * curve.best.summary.output_tokens_per_s  # others overlap
    for x, y, point in zip(xs, ys, points, strict=True):
        is_drawn = not math.isnan(x)
        if is_drawn and panel.names_loads and point.summary.output_tokens_per_s >= named_from:
            axes.annotate(
                f"{point.load:g}", (x, y), (4, 4), textcoords="offset points", size=7, color=colour
            )


def _finish(axes: Axes, panel: _Panel) -> None:
    axes.set_title(panel.title)
    axes.set(xlabel=panel.labels[0], ylabel=panel.labels[1])
    axes.grid(visible=True, which="both", linewidth=0.3)
    if "x" in panel.log:
        axes.set_xscale("log", base=2)
    else:
        axes.set_xlim(left=0)
    if "y" in panel.log:
        make_log(axes, "y")
    else:
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(plain)
    axes.xaxis.set_major_formatter(plain)
