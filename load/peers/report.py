"""What a comparison leaves: `DATE-peers.json`, and tables and a picture for people.

The JSON holds every observation, and the cells made of them. Ours comes first in every table, and
the fastest is bold, whoever it is. From the JSON the rest can be made again:

    python -m penstock.load.peers.report load/results/DATE-peers.json
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import psutil

from penstock.load.checkout import commit
from penstock.load.peers.cells import Cell, Observation, cells
from penstock.load.peers.picture import draw
from penstock.load.tables import table, write_report

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
    """A start or a workload that came to nothing."""

    model: str
    system: str
    setting: str
    workloads: tuple[str, ...]
    round: int
    reason: str


@dataclass(slots=True, kw_only=True)
class Report:
    """Attributes:
    unavailable: why, by system.
    """

    day: str
    machine: dict[str, Any]
    commit: str
    observations: list[Observation] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)

    @classmethod
    def begin(cls, *, is_real_time: bool) -> Report:
        scheduling = "SCHED_RR" if is_real_time else "normal: real time not permitted"
        return cls(
            day=date.today().isoformat(),
            machine={**machine(), "client_scheduling": scheduling},
            commit=commit(),
        )

    @classmethod
    def read(cls, path: Path) -> Report:
        """From the JSON that `write` made."""
        data = json.loads(path.read_text(encoding="utf-8"))
        return cls(
            day=data["date"],
            machine=data["machine"],
            commit=data["commit"],
            observations=[Observation(**each) for each in data["observations"]],
            versions=data["versions"],
            unavailable=data["unavailable"],
            failures=[Failure(**each) for each in data["failures"]],
        )


def write(report: Report, out: Path) -> list[Path]:
    """The files, new or again; their paths."""
    found = cells(report.observations)
    data = {
        "date": report.day,
        "machine": report.machine,
        "commit": report.commit,
        "versions": report.versions,
        "cells": [cell.to_json() for cell in found],
        "unavailable": report.unavailable,
        "failures": [asdict(failure) for failure in report.failures],
        "observations": [asdict(each) for each in report.observations],
    }
    name = f"{report.day}-peers"
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
        f"![Tokens per second by penstock's]({report.day}-peers.png)",
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
    """To ours, from pairs; where no pair is whole, the system cannot be called fastest."""
    return cell.ratio or 0.0


def _row(cell: Cell, *, is_fastest: bool) -> list[str]:
    mark = "**" if is_fastest else ""
    low, high = min(cell.ratios, default=None), max(cell.ratios, default=None)
    return [
        cell.workload,
        f"{mark}{cell.system}{mark}",
        f"{mark}{_number(cell.tokens_per_s)}{mark}",
        "–" if cell.ratio is None else f"{cell.ratio:.2f}",
        "–" if cell.system == "penstock" or low is None else f"{low:.2f}–{high:.2f}",
        _number(cell.median(lambda each: each.ttft_ms_p50)),
        _number(cell.median(lambda each: each.ttft_ms_p99)),
        _number(cell.median(lambda each: each.itl_ms_p50)),
        _number(cell.median(lambda each: each.itl_ms_p99)),
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
        rows.append(
            [
                f"{cell.workload} {cell.system}",
                _number(sum(shares.values())),
                each,
                f"{cell.median(lambda each: each.ready_s):.1f}",
                f"{cell.median(lambda each: each.idle_memory_bytes) / (1 << 20):,.0f}",
            ]
        )
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
    """Models and systems that a run which was cut short had not come to."""
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
    """Three digits that matter."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


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


if __name__ == "__main__":  # the tables and the picture once more, from the JSON of a run
    for name in sys.argv[1:]:
        print(*write(Report.read(Path(name)), Path(name).parent), sep="\n")
