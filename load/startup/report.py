"""What the startup bench says: tables, and figures for machines.

Knows nothing of how they were measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

from penstock.load.launch import Memory
from penstock.load.startup.parts import ProbedModel
from penstock.load.tables import table

_NUM_PACKAGES = 10
_NOTES = """\
Medians, and least to greatest, with files in the page cache. To the first token: the ready line and
then the first answer, asked for at once. Alone: gateway and engine start side by side in a server,
where they may share its cores; weights also make the model, imports of torch's that this takes
included. Imports: of a package's own modules, what they import of others apart; one run each under
`-X importtime`, which slows them.
Memory in MiB: resident counts all pages; proportional divides those that processes share, so that
it can be summed; unique would be free without the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start of a server.

    Attributes:
        ready_s: from the start of its process to its ready line.
        first_token_s: from a first request, sent then, to its first token.
        idle, used: memory of each process when ready, and after that request.
    """

    ready_s: float
    first_token_s: float
    idle: Mapping[str, Memory]
    used: Mapping[str, Memory]


@dataclass(frozen=True, slots=True, kw_only=True)
class Startup:
    """All that was measured.

    Attributes:
        alone: by process, the seconds of each part of each of its starts alone.
        imports: by process, seconds by package, longest first.
    """

    starts: Sequence[Start]
    alone: Mapping[str, Sequence[Mapping[str, float]]]
    imports: Mapping[str, Mapping[str, float]]


def markdown(model: ProbedModel, startup: Startup) -> str:
    return "\n\n".join(
        [
            f"{model.model}, dtype {model.dtype}, starts: {len(startup.starts)}",
            _times_table(startup.starts),
            "Each process started alone, seconds by part:",
            _alone_table(startup.alone),
            "Packages by the milliseconds their import takes:",
            _imports_table(startup.imports),
            "Memory when ready, and resident after a first request:",
            _memory_table(startup.starts),
            _NOTES,
        ]
    )


def figures(model: ProbedModel, startup: Startup) -> dict[str, Any]:
    """Everything measured, as plain data."""
    return {
        **asdict(model),
        "starts": [asdict(start) for start in startup.starts],
        "alone_s": {process: list(parts) for process, parts in startup.alone.items()},
        "imports_s": {process: dict(each) for process, each in startup.imports.items()},
    }


def _times_table(starts: Sequence[Start]) -> str:
    rows = [
        ("ready", [start.ready_s for start in starts]),
        ("first token", [start.ready_s + start.first_token_s for start in starts]),
    ]
    return table(
        ("from the start of the process to", "s", "min–max"),
        [[name, *_median_and_range(values)] for name, values in rows],
    )


def _alone_table(alone: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    names = list(dict.fromkeys(part for runs in alone.values() for part in runs[0]))
    columns = {process: _part_cells(runs) for process, runs in alone.items()}
    header = ["part", *(title for process in alone for title in (process, "min–max"))]
    rows = [
        [name, *(cell for cells in columns.values() for cell in cells.get(name, ("–", "–")))]
        for name in (*names, _ALL)
    ]
    return table(header, rows)


_ALL = "in all"


def _part_cells(runs: Sequence[Mapping[str, float]]) -> dict[str, tuple[str, str]]:
    cells = {part: _median_and_range([run[part] for run in runs]) for part in runs[0]}
    return {**cells, _ALL: _median_and_range([sum(run.values()) for run in runs])}


def _imports_table(imports: Mapping[str, Mapping[str, float]]) -> str:
    header = [title for process in imports for title in (process, "ms")]
    longest = [list(packages.items())[:_NUM_PACKAGES] for packages in imports.values()]
    rows = [
        [cell for package in each for cell in _package_cells(package)]
        for each in zip_longest(*longest, fillvalue=None)
    ]
    total = [
        cell
        for packages in imports.values()
        for cell in (_ALL, f"{1e3 * sum(packages.values()):,.0f}")
    ]
    return table(header, [*rows, total])


def _package_cells(package: tuple[str, float] | None) -> tuple[str, str]:
    if package is None:
        return ("–", "–")
    name, seconds = package
    return name, f"{1e3 * seconds:,.0f}"


def _memory_table(starts: Sequence[Start]) -> str:
    header = ("process", "resident", "proportional", "unique", "resident, used")
    idle = [start.idle for start in starts]
    used = [start.used for start in starts]
    columns = [
        _mebibytes(idle, lambda memory: memory.resident_bytes),
        _mebibytes(idle, lambda memory: memory.proportional_bytes),
        _mebibytes(idle, lambda memory: memory.unique_bytes),
        _mebibytes(used, lambda memory: memory.resident_bytes),
    ]
    rows = [[process, *(f"{column[process]:,.0f}" for column in columns)] for process in columns[0]]
    _, proportional, unique, _ = (f"{sum(column.values()):,.0f}" for column in columns)
    return table(header, [*rows, ["together", "–", proportional, unique, "–"]])


def _mebibytes(
    starts: Sequence[Mapping[str, Memory]], size: Callable[[Memory], int]
) -> dict[str, float]:
    """The median of a size over all starts, by process."""
    return {
        process: statistics.median(size(start[process]) for start in starts) / (1 << 20)
        for process in starts[0]
    }


def _median_and_range(values: Sequence[float]) -> tuple[str, str]:
    return f"{statistics.median(values):.2f}", f"{min(values):.2f}–{max(values):.2f}"
