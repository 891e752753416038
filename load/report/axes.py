"""Numbers along axes as people write them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TICKS = (2, 3, 5, 7)  # between powers of ten


def plain(value: float, _: float | None) -> str:
    """12,000, and 0.5."""
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


def make_log(axes: Axes, which: Literal["x", "y"]) -> None:
    """An axis by powers of ten, without any power written."""
    if which == "x":
        axes.set_xscale("log", subs=_TICKS)
    else:
        axes.set_yscale("log", subs=_TICKS)
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_formatter(plain)
    axis.set_minor_formatter(plain)
