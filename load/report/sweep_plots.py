"""The picture of a sweep: throughput against load, and what it costs in latency."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.load.plotting import BLUE, GREEN, ORANGE, SKY, new_figure
from penstock.load.report.axes import make_log, plain
from penstock.load.report.summary import Summary
from penstock.load.report.sweep import Curve, Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STYLES = tuple(
    (colour, marker) for marker in "osD^" for colour in (BLUE, ORANGE, GREEN, SKY)
)  # by server
_NAMED_FROM = 0.1  # of the best throughput


@dataclass(frozen=True, slots=True, kw_only=True)
class _Panel:
    """One pair of axes: what is drawn of each point."""

    title: str
    x_label: str
    y_label: str
    x: Callable[[Point], float]
    y: Callable[[Summary], float]
    tail: Callable[[Summary], float] | None = None  # drawn dashed: a p99
    has_log_x: bool = False
    has_log_y: bool = False
    names_loads: bool = False


def draw_sweep(curves: Sequence[Curve], *, title: str, load_name: str, path: Path) -> None:
    """Draw all servers' curves and write the picture.

    Args:
        load_name: what a load counts.

    Raises:
        ConfigError: matplotlib is not installed.
    """
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


def _panels(load_name: str) -> tuple[_Panel, ...]:
    return (
        _Panel(
            title="Throughput by load",
            x_label=load_name,
            y_label="output tokens/s",
            x=lambda point: point.load,
            y=lambda summary: summary.output_tokens_per_s,
            has_log_x=True,
        ),
        _Panel(
            title="Throughput against speed for one user: up and to the right is better",
            x_label="tokens/s of one stream (1 ÷ median TPOT)",
            y_label="output tokens/s of all",
            x=lambda point: 1e3 / point.summary.tpot_ms.p50,
            y=lambda summary: summary.output_tokens_per_s,
            names_loads=True,
        ),
        _Panel(
            title="Time to first token: median, and p99 dashed",
            x_label=load_name,
            y_label="ms",
            x=lambda point: point.load,
            y=lambda summary: summary.ttft_ms.p50,
            tail=lambda summary: summary.ttft_ms.p99,
            has_log_x=True,
            has_log_y=True,
        ),
        _Panel(
            title="Latency against throughput: E2E median, and p99 dashed",
            x_label="output tokens/s",
            y_label="ms",
            x=lambda point: point.summary.output_tokens_per_s,
            y=lambda summary: summary.e2e_ms.p50,
            tail=lambda summary: summary.e2e_ms.p99,
            has_log_y=True,
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
    if panel.names_loads:
        for x, y, point in zip(xs, ys, points, strict=True):
            if point.summary.output_tokens_per_s < _NAMED_FROM * _best(curve):
                continue  # they lie on top of each other
            axes.annotate(
                f"{point.load:g}", (x, y), (4, 4), textcoords="offset points", size=7, color=colour
            )


def _best(curve: Curve) -> float:
    return curve.best.summary.output_tokens_per_s


def _finish(axes: Axes, panel: _Panel) -> None:
    axes.set_title(panel.title)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.grid(visible=True, which="both", linewidth=0.3)
    if panel.has_log_x:
        axes.set_xscale("log", base=2)
    else:
        axes.set_xlim(left=0)
    if panel.has_log_y:
        make_log(axes, "y")
    else:
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(plain)
    axes.xaxis.set_major_formatter(plain)
