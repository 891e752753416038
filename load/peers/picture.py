"""The picture of a comparison: tokens per second of each system by those of penstock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.load import plotting
from penstock.load.peers.cells import OURS, Cell

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS: Mapping[str, str] = {
    OURS: plotting.BLUE,
    "vllm": plotting.ORANGE,
    "llamacpp": plotting.GREEN,
    "openvino": plotting.SKY,
    "hf": "#999999",
}
_TITLES: Mapping[str, str] = {
    OURS: "penstock",
    "vllm": "vLLM (CPU)",
    "llamacpp": "llama.cpp",
    "openvino": "OpenVINO (in process)",
    "hf": "Hugging Face (in process)",
}


def draw(found: Sequence[Cell], path: Path) -> None:
    """A group of bars for each model and workload, from ours up or down; a whisker spans all pairs.

    Ours is the line at 1, with its tokens per second under the group's name.
    """
    ours = [cell for cell in found if cell.system == OURS]
    groups = {(cell.model, cell.workload): place for place, cell in enumerate(ours)}
    systems = [name for name in _COLOURS if any(cell.system == name for cell in found)]
    figure = plotting.new_figure(max(8.0, 1.1 * len(groups) + 1.5), 4.4)
    axes = figure.subplots()
    axes.axhline(1.0, color=_COLOURS[OURS], linewidth=2, label=_TITLES[OURS])
    rivals = [name for name in systems if name != OURS]
    width = 0.84 / max(len(rivals), 1)
    for number, system in enumerate(rivals):
        mine = [cell for cell in found if cell.system == system and cell.ratio]
        offset = (number - (len(rivals) - 1) / 2) * width
        places = [groups[cell.model, cell.workload] + offset for cell in mine]
        heights = [(cell.ratio or 1.0) - 1 for cell in mine]
        colour, title = _COLOURS[system], _TITLES[system]
        axes.bar(places, heights, width * 0.94, bottom=1.0, color=colour, label=title)
        for x, cell in zip(places, mine, strict=True):
            _mark(axes, x, cell)
    _dress(axes, ours)
    figure.legend(loc="outside lower center", ncols=len(systems), fontsize=8)
    figure.savefig(path, dpi=150)


def _mark(axes: Axes, x: float, cell: Cell) -> None:
    """The whisker, and the ratio at the bar's end."""
    assert cell.ratio is not None
    low, high = min(cell.ratios), max(cell.ratios)
    if high > low:
        axes.plot([x, x], [low, high], color="black", linewidth=0.8)
    is_up = cell.ratio >= 1
    axes.annotate(
        f"×{cell.ratio:.2g}",
        (x, high if is_up else low),
        (0, 3 if is_up else -3),
        textcoords="offset points",
        ha="center",
        va="bottom" if is_up else "top",
        fontsize=7,
        rotation=90,
    )


def _dress(axes: Axes, ours: Sequence[Cell]) -> None:
    axes.set_yscale("log", base=2)
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.5) / 1.5, max(high, 2.0) * 1.5)  # room for the ratios
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xticks(
        range(len(ours)),
        [f"{cell.model} {cell.workload}\n{cell.tokens_per_s:,.0f}/s" for cell in ours],
    )
    axes.set_xlim(-0.6, len(ours) - 0.4)
    axes.set_title("Output tokens per second by those of penstock: above the line is faster")
    axes.set_ylabel("times penstock's (log scale)")
