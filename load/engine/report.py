"""What the engine bench says of its runs: tables, figures for machines, a picture.

Knows nothing of how they were made.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from penstock.engine.messages import EngineInfo
from penstock.load.engine.memory_use import MemoryUse
from penstock.load.engine.runs import Lengths, Phase, Run, Step
from penstock.load.engine.step_split import OTHER, PARTS
from penstock.load.plotting import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, new_figure
from penstock.load.tables import table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.container import BarContainer

_BAR = 0.10
_MEMORY = """\
What a decode step has to read of memory, how fast it does so, and how fast memory was read just \
before each run by as many threads (bar: 75% of that, for one sequence of M):"""
_POLICY = ("schedule", "prepare", "update")
_NOTES = """\
tok/s: output tokens of a whole run; prefill: prompt tokens while not every sequence had its first
token; decode: while all sequences took a token each. Medians of the repeats.
Parts: schedule and update are the scheduler's, prepare makes the tensors of a step, forward runs
the model to its logits (the CPU's kernels draw the tokens in the same call), sample chooses tokens,
other is all the rest of the step. They are timed in runs of their own; on a GPU each part waits for
the device there. Shares are of the sum over all steps, so they add up; medians need not.
Detokenising is the gateway's and no part of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """All runs of one count of sequences.

    Attributes:
        runs: as the engine is.
        split_runs: with the parts of their steps.
        detokenize_s_per_token: None without a tokenizer.
        memory: None on a GPU.
    """

    num_seqs: int
    runs: Sequence[Run]
    split_runs: Sequence[Run]
    detokenize_s_per_token: float | None
    memory: MemoryUse | None = None

    def split_steps(self, phase: Phase) -> list[Step]:
        return [step for run in self.split_runs for step in run.phase(phase)]

    def policy_share(self) -> float:
        """Policy, preparation and detokenising ÷ the decode step with detokenising."""
        steps = self.split_steps("decode")
        step_s = sum(step.step_s for step in steps)
        text_s = (self.detokenize_s_per_token or 0.0) * sum(step.num_tokens for step in steps)
        policy_s = sum(step.parts_s[part] for step in steps for part in _POLICY)
        return (policy_s + text_s) / (step_s + text_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTime:
    """One part over many steps; `share` is of their whole time."""

    median_ms: float
    p99_ms: float
    mean_ms: float
    share: float


def split(steps: Sequence[Step]) -> dict[str, PartTime]:
    """Every part's time, and the whole step's as `step`."""
    values = {part: [step.parts_s[part] for step in steps] for part in PARTS}
    values["step"] = [step.step_s for step in steps]
    total_s = sum(values["step"])
    return {part: _part_time(times, total_s) for part, times in values.items()}


def _part_time(times_s: Sequence[float], total_s: float) -> PartTime:
    median, p99 = 1e3 * np.percentile(times_s, (50, 99))
    return PartTime(
        median_ms=float(median),
        p99_ms=float(p99),
        mean_ms=1e3 * statistics.fmean(times_s),
        share=sum(times_s) / total_s,
    )


# -- words ------------------------------------------------------------------------------------


def markdown(title: str, cells: Sequence[Cell]) -> str:
    memory = {cell.num_seqs: cell.memory for cell in cells if cell.memory is not None}
    return "\n\n".join(
        [
            title,
            _speeds(cells),
            *([_MEMORY, _memory_table(memory)] if memory else []),
            "Decode step by its parts, ms: median / 99th percentile, share of the time:",
            _split_table(cells, "decode", _times),
            "Steps with prompts in them, ms: mean, share of the time:",
            _split_table(cells, "prefill", _mean),
            _verdict(cells),
            _NOTES,
        ]
    )


def _speeds(cells: Sequence[Cell]) -> str:
    header = ("sequences", "tok/s", "min–max", "prefill tok/s", "decode tok/s", "step ms",
              "p99 ms", "detokenise µs/token")  # fmt: skip
    rows = []
    for cell in cells:
        rates = [run.output_tokens_per_s for run in cell.runs]
        text_s = cell.detokenize_s_per_token
        median, p99 = np.percentile(_decode_ms(cell), (50, 99))
        rows.append(
            [
                f"{cell.num_seqs:,}",
                f"{statistics.median(rates):,.0f}",
                f"{min(rates):,.0f}–{max(rates):,.0f}",
                f"{statistics.median(run.prefill_tokens_per_s for run in cell.runs):,.0f}",
                f"{statistics.median(run.decode_tokens_per_s for run in cell.runs):,.0f}",
                f"{median:.2f}",
                f"{p99:.2f}",
                "–" if text_s is None else f"{1e6 * text_s:.1f}",
            ]
        )
    return table(header, rows)


def _memory_table(uses: Mapping[int, MemoryUse]) -> str:
    header = ("sequences", "weights MB", "KV MB", "read GB/s", "at most GB/s", "share")
    rows = [
        [
            f"{num_seqs:,}",
            f"{use.step_bytes.weights / 1e6:,.1f}",
            f"{use.step_bytes.kv / 1e6:,.1f}",
            f"{statistics.median(use.rates) / 1e9:.1f}",
            f"{statistics.median(use.ceilings) / 1e9:.1f}",
            f"{use.share:.0%}",
        ]
        for num_seqs, use in uses.items()
    ]
    return table(header, rows)


def _decode_ms(cell: Cell) -> list[float]:
    return [1e3 * step.step_s for run in cell.runs for step in run.phase("decode")]


def _split_table(cells: Sequence[Cell], phase: Phase, text: Callable[[PartTime], str]) -> str:
    splits = [split(cell.split_steps(phase)) for cell in cells]
    header = ["part", *(f"{cell.num_seqs:,} at once" for cell in cells)]
    rows = [[part, *(text(each[part]) for each in splits)] for part in (*PARTS, "step")]
    return table(header, rows)


def _times(part: PartTime) -> str:
    return f"{part.median_ms:.3f} / {part.p99_ms:.3f}  {part.share:6.1%}"


def _mean(part: PartTime) -> str:
    return f"{part.mean_ms:.3f}  {part.share:6.1%}"


def _verdict(cells: Sequence[Cell]) -> str:
    last = cells[-1]
    parts = "Policy and preparation"
    if last.detokenize_s_per_token is not None:
        parts = "Policy, preparation and detokenising"
    return (
        f"{parts} take {last.policy_share():.1%} of a decode step with {last.num_seqs} sequences "
        f"(bar: {_BAR:.0%} with 32)."
    )


def figures(info: EngineInfo, lengths: Lengths, cells: Sequence[Cell]) -> dict[str, Any]:
    """Everything measured, as plain data."""
    return {
        "model": info.model,
        "dtype": info.dtype,
        "device": info.device,
        "num_threads": info.num_threads,
        "torch": torch.__version__,
        **asdict(lengths),
        "cells": [
            {
                "num_seqs": cell.num_seqs,
                "num_output_tokens": sum(map(len, cell.runs[0].tokens)),
                "output_tokens_per_s": [run.output_tokens_per_s for run in cell.runs],
                "prefill_tokens_per_s": [run.prefill_tokens_per_s for run in cell.runs],
                "decode_tokens_per_s": [run.decode_tokens_per_s for run in cell.runs],
                "detokenize_s_per_token": cell.detokenize_s_per_token,
                "policy_share": cell.policy_share(),
                "memory": cell.memory and {**asdict(cell.memory), "share": cell.memory.share},
                "num_decode_steps": len(cell.split_steps("decode")),
                "decode": _plain(split(cell.split_steps("decode"))),
                "prefill": _plain(split(cell.split_steps("prefill"))),
            }
            for cell in cells
        ],
    }


def _plain(parts: Mapping[str, PartTime]) -> dict[str, dict[str, float]]:
    return {name: asdict(part) for name, part in parts.items()}


# -- the picture ------------------------------------------------------------------------------

_FORWARD = "forward"
_COLOURS = {
    "schedule": BLUE,
    "prepare": SKY,
    _FORWARD: ORANGE,
    "sample": GREEN,
    "update": PURPLE,
    OTHER: GREY,
}


def draw(title: str, cells: Sequence[Cell], path: Path) -> None:
    """Draw a decode step's parts by the number of sequences, with and without the forward pass.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    figure = new_figure(10, 4)
    figure.suptitle(f"Where a decode step's time goes\n{title}", x=0.01, ha="left", size=11)
    left, right = figure.subplots(1, 2)
    names = [f"{cell.num_seqs:,}" for cell in cells]
    splits = [split(cell.split_steps("decode")) for cell in cells]
    bars = _draw_bars(left, names, splits, parts=PARTS)
    left.bar_label(bars, [f"{each['step'].mean_ms:.1f} ms" for each in splits], padding=2)
    left.set_title("the whole step, mean (ms)")
    parts = [part for part in PARTS if part != _FORWARD]
    bars = _draw_bars(right, names, splits, parts=parts)
    rests = [1.0 - each[_FORWARD].share for each in splits]
    right.bar_label(bars, [f"{rest:.1%} of the step" for rest in rests], padding=2)
    right.set_title("all but the forward pass, mean (ms)")
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center")
    figure.savefig(path, dpi=150)


def _draw_bars(
    axes: Axes,
    names: Sequence[str],
    splits: Sequence[Mapping[str, PartTime]],
    *,
    parts: Sequence[str],
) -> BarContainer:
    """Stack the parts; the bars on top."""
    bottoms = [0.0] * len(names)
    for part in parts:
        heights = [each[part].mean_ms for each in splits]
        bars = axes.bar(names, heights, 0.6, bottom=bottoms, label=part, color=_COLOURS[part])
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axes.set_xlabel("sequences")
    axes.margins(y=0.1)
    return bars
