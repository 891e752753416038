"""The results of a comparison: `DATE-peers.json`, and tables and a picture made from it.

The JSON holds every observation and the cells made of them. Ours comes first in every table, and
the fastest is bold. To make the rest again from the JSON, and its table in RESULTS.md:

    python -m penstock.load.peers.report load/results/DATE-peers.json
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from penstock.load.machine import commit
from penstock.load.peers.environments import OURS
from penstock.load.report import plots
from penstock.load.report.tables import replace_marked, table, write_report

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# From observations to cells: the setting that counts, medians, ratios.
#
# A pair is a run of ours and one of a rival right after it. Machines drift, so a ratio is
# taken of each pair, and then the median of the ratios.


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One workload, once, by one system as it was started; with any fault it does not count."""

    model: str
    workload: str
    system: str
    setting: str  # by name; `flags` says all of it
    flags: str
    round: int  # from 0
    pair: str  # the rival of the pair; a rival's own name for itself
    output_tokens_per_s: float
    ttft_ms_p50: float
    ttft_ms_p99: float
    itl_ms_p50: float
    itl_ms_p99: float
    turn_ttft_ms: tuple[float, ...] = ()  # median of each turn, in conversations
    cpu_s_per_1k_tokens: Mapping[str, float] = field(default_factory=dict)  # of output, by process
    ready_s: float = 0.0
    idle_memory_bytes: int = 0
    num_cached_tokens: int = 0
    client_cpu_share: float = 0.0
    faults: Mapping[str, int] = field(default_factory=dict)

    @property
    def counts(self) -> bool:
        return not self.faults and self.output_tokens_per_s > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One system's results for one workload, with the best of its settings."""

    model: str
    workload: str
    system: str
    best: Sequence[Observation]  # the observations of that setting
    ratios: Sequence[float]  # of each pair, the rival's tokens per second by ours; none for ours

    def median(self, figure: Callable[[Observation], float]) -> float:
        return statistics.median(map(figure, self.best))

    @property
    def tokens_per_s(self) -> float:
        return self.median(lambda each: each.output_tokens_per_s)

    @property
    def ratio(self) -> float | None:
        """Relative to ours; None if no pair is complete."""
        if self.system == OURS:
            return 1.0
        return statistics.median(self.ratios) if self.ratios else None

    def turn_ttft_ms(self) -> list[float]:
        """The median of each turn."""
        turns = zip(*(each.turn_ttft_ms for each in self.best), strict=True)
        return [statistics.median(turn) for turn in turns]

    def cpu_s_per_1k_tokens(self) -> dict[str, float]:
        names = sorted({name for each in self.best for name in each.cpu_s_per_1k_tokens})
        return {
            name: statistics.median(each.cpu_s_per_1k_tokens.get(name, 0.0) for each in self.best)
            for name in names
        }

    def to_json(self) -> dict[str, Any]:
        def medians(*names: str) -> dict[str, float]:
            return {name: self.median(attrgetter(name)) for name in names}

        return {
            **{name: getattr(self, name) for name in ("model", "workload", "system")},
            "settings": self.best[0].flags,
            "output_tokens_per_s": self.tokens_per_s,
            **medians("ttft_ms_p50", "ttft_ms_p99", "itl_ms_p50", "itl_ms_p99"),
            "repeats": len(self.best),
            "ratio_to_penstock": self.ratio,
            "ratio_min": min(self.ratios, default=self.ratio),
            "ratio_max": max(self.ratios, default=self.ratio),
            "turn_ttft_ms": self.turn_ttft_ms(),
            "cpu_s_per_1k_tokens": self.cpu_s_per_1k_tokens(),
            **medians("ready_s", "idle_memory_bytes", "client_cpu_share"),
        }


def chosen_setting(observations: Iterable[Observation], key: tuple[str, str, str]) -> str | None:
    """The setting that was fastest when each was first measured; it stays so for the run. `key`
    is model, workload and system."""
    first: dict[str, float] = {}
    for each in observations:
        if _key(each) == key and each.counts:
            first.setdefault(each.setting, each.output_tokens_per_s)
    return max(first, key=first.__getitem__, default=None)


def cells(observations: Sequence[Observation]) -> list[Cell]:
    """In the order of the observations, ours before rivals."""
    keys = dict.fromkeys(_key(each) for each in observations)
    return [
        cell
        for key in sorted(keys, key=lambda key: key[2] != OURS)  # stable
        if (cell := _cell(observations, key)) is not None
    ]


def _cell(observations: Sequence[Observation], key: tuple[str, str, str]) -> Cell | None:
    best = _best(observations, key)
    if not best:
        return None
    model, workload, system = key
    ours = {
        each.round: each.output_tokens_per_s
        for each in _best(observations, (model, workload, OURS))
        if each.pair == system
    }
    ratios = [each.output_tokens_per_s / ours[each.round] for each in best if each.round in ours]
    return Cell(model=model, workload=workload, system=system, best=best, ratios=ratios)


def _best(observations: Sequence[Observation], key: tuple[str, str, str]) -> list[Observation]:
    setting = chosen_setting(observations, key)
    return [
        each
        for each in observations
        if _key(each) == key and each.setting == setting and each.counts
    ]


def _key(observation: Observation) -> tuple[str, str, str]:
    return observation.model, observation.workload, observation.system


# -- the picture --------------------------------------------------------------------------------

_COLOURS: Mapping[str, str] = {
    OURS: plots.BLUE,
    "vllm": plots.ORANGE,
    "llamacpp": plots.GREEN,
    "openvino": plots.SKY,
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
    """A group of bars for each model and workload, relative to ours; whiskers span all pairs.

    Ours is the line at 1, with its tokens per second under the group's name.
    """
    ours = [cell for cell in found if cell.system == OURS]
    groups = {(cell.model, cell.workload): place for place, cell in enumerate(ours)}
    systems = list(dict.fromkeys(cell.system for cell in found))
    figure = plots.new_figure(max(8.0, 1.1 * len(groups) + 1.5), 4.4)
    axes = figure.subplots()
    axes.axhline(1.0, color=_COLOURS[OURS], linewidth=2, label=_TITLES[OURS])
    rivals = [name for name in systems if name != OURS]
    width = 0.84 / max(len(rivals), 1)
    # The first variant of a rival has its full colour.
    variants = {name.partition("-")[0]: name.partition("-")[2] for name in reversed(rivals)}
    for number, system in enumerate(rivals):
        mine = [cell for cell in found if cell.system == system and cell.ratio]
        offset = (number - (len(rivals) - 1) / 2) * width
        places = [groups[cell.model, cell.workload] + offset for cell in mine]
        heights = [(cell.ratio or 1.0) - 1 for cell in mine]
        family, _, variant = system.partition("-")
        colour, title = _COLOURS[family], " ".join([_TITLES[family], variant]).strip()
        alpha = 0.6 if variant and variant != variants[family] else 1.0
        axes.bar(places, heights, width * 0.94, bottom=1.0, color=colour, label=title, alpha=alpha)
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


# -- the files and their tables -----------------------------------------------------------------

_HEADER = (
    "workload", "system", "tokens/s", "by penstock's", "spread", "TTFT ms p50", "p99",
    "ITL ms p50", "p99", "setting",
)  # fmt: skip
_NOTES = """\
tokens/s: output tokens by wall time, median of the rounds. by penstock's: the system's tokens/s by
those of the penstock run right before it, median of these pairs; more than 1 means that the rival
is faster. spread: smallest and largest pair. Only ratios are worth comparing between machines, or
days. Of several settings the one that was fastest in the first round counts; all are in the JSON.
OpenVINO and Hugging Face run in process: there is no HTTP, no tokenizer and no client in their
figures, which is in their favour. Latencies count from when a request was due."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A start or a workload that failed."""

    model: str
    system: str
    setting: str
    workloads: tuple[str, ...]
    round: int
    reason: str


@dataclass(slots=True, kw_only=True)
class Report:
    day: str
    machine: dict[str, Any]
    commit: str
    comparison: str = "bf16"  # a key of `RIVALS`
    observations: list[Observation] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)  # why, by system
    failures: list[Failure] = field(default_factory=list)

    @classmethod
    def begin(cls, *, is_real_time: bool, comparison: str = "bf16") -> Report:
        scheduling = "SCHED_RR" if is_real_time else "normal: real time not permitted"
        return cls(
            day=date.today().isoformat(),
            machine={**machine(), "client_scheduling": scheduling},
            commit=commit(),
            comparison=comparison,
        )

    @classmethod
    def read(cls, path: Path) -> Report:
        """From the JSON that `write` made."""
        data = json.loads(path.read_text(encoding="utf-8"))
        names = ("machine", "commit", "versions", "unavailable")
        return cls(
            day=data["date"],
            observations=[Observation(**each) for each in data["observations"]],
            failures=[Failure(**each) for each in data["failures"]],
            comparison=data.get("comparison", "bf16"),
            **{name: data[name] for name in names},
        )

    @property
    def name(self) -> str:
        """Of its files."""
        kind = "" if self.comparison == "bf16" else f"-{self.comparison}"
        return f"{self.day}-peers{kind}"


def write(report: Report, out: Path) -> list[Path]:
    """Write or rewrite the files; return their paths."""
    found = cells(report.observations)
    data = {
        "date": report.day,
        "comparison": report.comparison,
        "machine": report.machine,
        "commit": report.commit,
        "versions": report.versions,
        "cells": [cell.to_json() for cell in found],
        "unavailable": report.unavailable,
        "failures": [asdict(failure) for failure in report.failures],
        "observations": [asdict(each) for each in report.observations],
    }
    name = report.name
    paths = write_report(out, name, markdown=markdown(report, found), data=data)
    if found:
        picture = out / f"{name}.png"
        draw(found, picture)
        paths.append(picture)
    return paths


def markdown(report: Report, found: Sequence[Cell]) -> str:
    where = report.machine
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    parts = [
        "# Rivals side by side",
        f"{report.day}, commit {report.commit}. {where['cpu']}, {where['cores']} cores, "
        f"{where['memory_gib']} GiB. Client: {where['client_scheduling']}.\n\n{versions}.",
        f"![Tokens per second by penstock's]({report.name}.png)",
        _NOTES,
    ]
    for model in dict.fromkeys(cell.model for cell in found):
        mine = [cell for cell in found if cell.model == model]
        parts += [f"## Model {model}", _figures(mine), *_turns(mine), *_costs(mine)]
    parts += _what_is_missing(report)
    return "\n\n".join(parts)


def _figures(found: Sequence[Cell]) -> str:
    rows = []
    for workload in dict.fromkeys(cell.workload for cell in found):
        group = [cell for cell in found if cell.workload == workload]
        fastest = max(group, key=_relative)
        rows += [_row(cell, is_fastest=cell is fastest) for cell in group]
    return table(_HEADER, rows)


def _relative(cell: Cell) -> float:
    """The ratio to ours; without a complete pair, a system cannot be called fastest."""
    return cell.ratio or 0.0


def _row(cell: Cell, *, is_fastest: bool) -> list[str]:
    mark = "**" if is_fastest else ""
    is_rival = cell.system != OURS and cell.ratios
    latencies = ("ttft_ms_p50", "ttft_ms_p99", "itl_ms_p50", "itl_ms_p99")
    return [
        cell.workload,
        f"{mark}{cell.system}{mark}",
        f"{mark}{_number(cell.tokens_per_s)}{mark}",
        "–" if cell.ratio is None else f"{cell.ratio:.2f}",
        f"{min(cell.ratios):.2f}–{max(cell.ratios):.2f}" if is_rival else "–",
        *(_number(cell.median(attrgetter(name))) for name in latencies),
        cell.best[0].setting,
    ]


def _turns(found: Sequence[Cell]) -> Iterator[str]:
    rows = [
        [f"{cell.workload} {cell.system}", *map(_number, cell.turn_ttft_ms())]
        for cell in found
        if cell.turn_ttft_ms()
    ]
    if rows:
        rows.sort(key=lambda row: row[0].split()[0])  # stable: ours stays first
        turns = [f"turn {number + 1}" for number in range(len(rows[0]) - 1)]
        yield "Median TTFT in ms by turn of a conversation:"
        yield table(["", *turns], rows)


def _costs(found: Sequence[Cell]) -> Iterator[str]:
    rows = []
    for cell in found:
        shares = cell.cpu_s_per_1k_tokens()
        each = ", ".join(f"{name} {_number(seconds)}" for name, seconds in shares.items())
        row = [f"{cell.workload} {cell.system}", _number(sum(shares.values())), each]
        row.append(f"{cell.median(attrgetter('ready_s')):.1f}")
        row.append(f"{cell.median(attrgetter('idle_memory_bytes')) / (1 << 20):,.0f}")
        rows.append(row)
    yield "Processor seconds for 1,000 output tokens, and what a start takes:"
    yield table(["", "CPU s per 1,000", "by process", "ready after s", "idle MiB"], rows)


def _what_is_missing(report: Report) -> Iterator[str]:
    yield "## Not available"
    lines = [f"- {name}: {reason}" for name, reason in report.unavailable.items()]
    yield "\n".join(lines) or "Nothing: every rival was installed."
    faults = [
        f"- {each.model} {each.workload} {each.system} ({each.setting}), round {each.round + 1}: "
        + ", ".join(f"{fault} ×{number}" for fault, number in each.faults.items())
        for each in report.observations
        if each.faults
    ]
    failed = [
        f"- {each.model} {each.system} ({each.setting}), round {each.round + 1}, "
        f"{', '.join(each.workloads)}: {each.reason}"
        for each in report.failures
    ]
    if faults or failed:
        yield "## Failed, and in no figure above"
        yield "\n".join([*failed, *faults])
    unseen = _unseen(report)
    if unseen:
        yield "## Not measured: the run was ended before"
        yield "\n".join(f"- {model} {system}" for model, system in unseen)


def _unseen(report: Report) -> list[tuple[str, str]]:
    """Models and systems that an interrupted run did not reach."""
    seen = {(each.model, each.system) for each in report.observations}
    seen |= {(each.model, each.system) for each in report.failures}
    models = dict.fromkeys(model for model, _ in sorted(seen))
    return [
        (model, system)
        for model in models
        for system in report.versions
        if (model, system) not in seen and system not in report.unavailable
    ]


def _number(value: float) -> str:
    """Three significant digits."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


# -- the table in RESULTS.md ---------------------------------------------------------------------

RESULTS = Path(__file__).parents[1] / "RESULTS.md"
_WORKLOADS = {
    "single": "single stream",
    "c8": "8 in flight",
    "c32": "32 in flight",
    "prefill": "prompts of 2,000",
    "front128": "128 in flight",
    "echo": "copying the prompt",
    "novel": "nothing to copy",
}


def marker(comparison: str) -> str:
    """Of the table of this comparison."""
    kind = "" if comparison == "bf16" else f" in {comparison}"
    return f"rivals{kind}: written by load.peers.report"


def summary(found: Sequence[Cell]) -> str:
    """Tokens per second of ours, and ours by each rival's."""
    systems = [name for name in dict.fromkeys(cell.system for cell in found) if name != OURS]
    by_place = {(cell.model, cell.workload, cell.system): cell for cell in found}
    rows = []
    for model, workload in dict.fromkeys((cell.model, cell.workload) for cell in found):
        ours = by_place.get((model, workload, OURS))
        if workload not in _WORKLOADS or ours is None:
            continue
        rivals = (by_place.get((model, workload, name)) for name in systems)
        rows.append(
            [
                f"{model}, {_WORKLOADS[workload]}",
                f"{ours.tokens_per_s:,.0f}",
                *(
                    "–" if each is None or not each.ratio else f"{1 / each.ratio:.2f}×"
                    for each in rivals
                ),
            ]
        )
    return table(["", "our tokens/s", *(f"by {name}" for name in systems)], rows)


def machine() -> dict[str, Any]:
    """What figures depend on most."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / (1 << 30), 1),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text("utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


if __name__ == "__main__":
    for name in sys.argv[1:]:
        report = Report.read(Path(name))
        print(*write(report, Path(name).parent), sep="\n")
        replace_marked(RESULTS, marker(report.comparison), summary(cells(report.observations)))
