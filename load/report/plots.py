"""A common look for pictures; matplotlib, an optional dependency, is imported only here.

Colour-blind readers can tell the colours apart: Okabe and Ito, "Color Universal Design" (2008).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.engine.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLUE, SKY, ORANGE, GREEN = "#0072B2", "#56B4E9", "#E69F00", "#009E73"

_LOOK: Any = {  # matplotlib types the keys one by one, differently in every release
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of this size in inches. Raises ConfigError if matplotlib is not installed."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("a plot needs matplotlib: pip install 'penstock-llm[bench]'") from error
    mpl.rcParams.update(_LOOK)
    return Figure(figsize=(width, height), layout="constrained")
