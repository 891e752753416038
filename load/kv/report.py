"""What the KV bench says of its replays: a table, figures for machines, a picture.

Knows nothing of how they were made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.load.kv.schemes import Replay
from penstock.load.plotting import BLUE, GREEN, GREY, ORANGE, SKY, new_figure
from penstock.load.tables import table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_HEADER = (
    "scheme",
    "waste",
    "pool used",
    "held at once",
    "mean running",
    "steps",
    "preemptions",
    "recomputed",
)
_NOTES = """\
waste: empty ÷ allocated token slots of running sequences, summed over steps. pool used: share of
all slots that hold a token, mean over steps. held at once: sequences running when memory first
forced one out; of the contiguous schemes, which reserve beforehand, the most that ever ran. mean
running: over all steps. recomputed: tokens computed again after preemptions ÷ all computed."""
_MAX_POINTS = 600  # of a curve; finer than the picture's pixels is lost


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One trace and what every scheme made of it."""

    title: str
    label: str
    num_tokens: int  # prompt and output, each computed once
    contiguous: Sequence[Replay]
    paged: Sequence[Replay]

    @property
    def replays(self) -> list[Replay]:
        return [*self.contiguous, *self.paged]


def markdown(workload: Workload) -> str:
    """The workload's title and table."""
    rows = [_row(replay, workload) for replay in workload.replays]
    return f"## {workload.title}\n\n{table(_HEADER, rows)}"


def verdict(workload: Workload, *, block_size: int) -> str:
    """What the paged scheme gains over the contiguous ones, beside the bars it is held to."""
    paged = next(item for item in workload.paged if item.scheme.endswith(f" {block_size}"))
    ratios = [paged.num_held / item.num_held for item in workload.contiguous]
    means = [paged.mean_running / item.mean_running for item in workload.contiguous]
    names = [item.scheme for item in workload.contiguous]
    lines = [
        f"Paged in blocks of {block_size}: {paged.waste:.2%} of the allocated slots are empty "
        "(bar: under 4 %).",
        *(
            f"Against {name}: {ratio:.1f} times the sequences at once, {mean:.1f} times on average."
            for name, ratio, mean in zip(names, ratios, means, strict=True)
        ),
        "Bars for sequences at once: 4 times max length, 2 times prompt + max_tokens.",
    ]
    return "\n".join(lines)


def notes() -> str:
    return _NOTES


def figures(workload: Workload) -> dict[str, Any]:
    """The workload's figures as plain data."""
    return {
        "title": workload.title,
        "schemes": {
            replay.scheme: {
                "num_slots": replay.num_slots,
                "waste": replay.waste,
                "utilisation": replay.utilisation,
                "num_held": replay.num_held,
                "mean_running": replay.mean_running,
                "num_steps": replay.num_steps,
                "num_preemptions": replay.num_preemptions,
                "num_computed_tokens": replay.num_computed_tokens,
                "num_finished": replay.num_finished,
            }
            for replay in workload.replays
        },
    }


def _row(replay: Replay, workload: Workload) -> list[str]:
    recomputed = 1.0 - workload.num_tokens / replay.num_computed_tokens
    return [
        replay.scheme,
        f"{replay.waste:.1%}",
        f"{replay.utilisation:.1%}",
        f"{replay.num_held:,}",
        f"{replay.mean_running:.1f}",
        f"{replay.num_steps:,}",
        f"{replay.num_preemptions:,}",
        f"{recomputed:.1%}",
    ]


# -- the picture ------------------------------------------------------------------------------


def draw(workloads: Sequence[Workload], *, block_size: int, path: Path) -> None:
    """Draw the first workload's pool over time per scheme, and all workloads' waste.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    first = workloads[0]
    shown = [
        *first.contiguous,
        *(item for item in first.paged if item.scheme.endswith(f" {block_size}")),
    ]
    figure = new_figure(15, 8.5)
    figure.suptitle(f"KV memory in the same bytes\n{first.title}", x=0.01, ha="left", size=12)
    grid = figure.add_gridspec(2, 1, height_ratios=(1, 1.05))
    above = grid[0].subgridspec(1, len(shown))
    below = grid[1].subgridspec(1, 2, width_ratios=(1.25, 1))
    num_steps = max(replay.num_steps for replay in shown)
    for column, replay in enumerate(shown):
        axes = figure.add_subplot(above[column])
        _draw_pool(axes, replay, num_steps)
        if column == 0:
            axes.set_ylabel("share of the pool's token slots (%)")
        else:
            axes.tick_params(labelleft=False)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper right", ncols=3)
    _draw_waste(figure.add_subplot(below[0]), workloads)
    _draw_sequences(figure.add_subplot(below[1]), first)
    figure.savefig(path, dpi=150)


def _draw_pool(axes: Axes, replay: Replay, num_steps: int) -> None:
    """One scheme's slots over time, stacked: used, allocated but empty, free."""
    width = -(-replay.num_steps // _MAX_POINTS)
    steps = list(range(0, replay.num_steps, width))
    scale = 100.0 / replay.num_slots
    used = [scale * _mean(replay.used[step : step + width]) for step in steps]
    allocated = [scale * _mean(replay.allocated[step : step + width]) for step in steps]
    axes.stackplot(
        steps,
        used,
        [total - part for total, part in zip(allocated, used, strict=True)],
        [100.0 - total for total in allocated],
        labels=("hold a token", "allocated but empty", "free"),
        colors=(BLUE, ORANGE, GREY),
        linewidth=0,
    )
    axes.set_title(
        f"{replay.scheme}\n{replay.waste:.1%} waste, {replay.mean_running:.0f} running, "
        f"{replay.num_steps:,} steps"
    )
    axes.set_xlim(0, num_steps)
    axes.set_ylim(0, 100)
    axes.set_xlabel("step (a token for every running sequence)")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.locator_params(axis="x", nbins=4)


def _draw_waste(axes: Axes, workloads: Sequence[Workload]) -> None:
    names = [replay.scheme for replay in workloads[0].replays]
    width = 0.8 / len(workloads)
    for index, (workload, colour) in enumerate(zip(workloads, (BLUE, SKY, GREEN), strict=False)):
        places = [place + (index - (len(workloads) - 1) / 2) * width for place in range(len(names))]
        wastes = [100.0 * replay.waste for replay in workload.replays]
        bars = axes.bar(places, wastes, width, label=workload.label, color=colour)
        axes.bar_label(bars, fmt="%.1f", padding=2, size=7)
    axes.axhline(4.0, color=ORANGE, linestyle="--", linewidth=1, zorder=0, label="4 %")
    axes.set_title("Waste: empty ÷ allocated slots of running sequences")
    axes.set_ylabel("waste (%)")
    axes.set_xticks(range(len(names)), [name.replace(" ", "\n", 1) for name in names])
    axes.legend(loc="upper right")


def _draw_sequences(axes: Axes, workload: Workload) -> None:
    names = [replay.scheme for replay in workload.replays]
    held = [replay.num_held for replay in workload.replays]
    mean = [replay.mean_running for replay in workload.replays]
    places = range(len(names))
    for offset, values, label, colour in (
        (-0.2, held, "held at once before the first preemption", BLUE),
        (0.2, mean, "running, mean over steps", SKY),
    ):
        bars = axes.barh([place + offset for place in places], values, 0.4, label=label,
                         color=colour)  # fmt: skip
        axes.bar_label(bars, fmt="{:,.0f}", padding=3, size=8)
    axes.set_title(f"Sequences in the same bytes ({workload.label})")
    axes.set_xlabel("sequences")
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.legend(loc="upper right")


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values)
