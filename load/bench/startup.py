"""`penstock bench startup`: seconds until a server is ready and until its first token; its memory.

Real servers are started and stopped, and then each of their processes alone, split into parts.
Measuring the imports first puts all files into the page cache: a first start after boot is not
measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

from penstock.engine.config import DEMO_MODEL, DTYPES
from penstock.engine.errors import ConfigError
from penstock.load.bench.startup_probe import IMPORTS
from penstock.load.client.records import Call, StreamRecord
from penstock.load.client.sse import SseTransport
from penstock.load.launch import Memory, Started, server
from penstock.load.report.options import add_out
from penstock.load.report.tables import publish, table

_IMPORT_LINE = re.compile(r"import time:\s+(?P<self_us>\d+) \|\s+\d+ \|\s+(?P<name>\S+)")
_TAIL_LINES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedModel:
    """The model that the processes are started with."""

    model: str
    dtype: str


def start_alone(process: str, model: ProbedModel) -> dict[str, float]:
    """Seconds of each part of a process's start."""
    parts: dict[str, float] = json.loads(_probe(process, model).stdout)
    return parts


def import_times(process: str, model: ProbedModel) -> dict[str, float]:
    """Seconds by top-level package, longest first, over the whole start. What one package imports
    of another counts for that other. Taking times makes imports slower."""
    return parse_import_times(_probe(process, model, "-X", "importtime").stderr)


def parse_import_times(text: str) -> dict[str, float]:
    """Seconds by top-level package, from the output of `python -X importtime`."""
    seconds: Counter[str] = Counter()
    for line in text.splitlines():
        found = _IMPORT_LINE.match(line)
        if found is not None:
            package, _, _ = found["name"].partition(".")
            seconds[package] += int(found["self_us"])
    return {package: microseconds / 1e6 for package, microseconds in seconds.most_common()}


def _probe(process: str, model: ProbedModel, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the probe. Raises ConfigError if it fails, for example if the model cannot be loaded."""
    probe = (*options, "-m", "penstock.load.bench.startup_probe", process)
    launched_s = time.perf_counter()
    done = subprocess.run(  # noqa: S603  (our own module)
        [sys.executable, *probe, repr(launched_s), model.model, model.dtype],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        tail = "\n".join(done.stderr.splitlines()[-_TAIL_LINES:])
        raise ConfigError(f"the {process} did not start alone:\n{tail}")
    return done


# -- the command --------------------------------------------------------------------------------

_PROMPT = (1, 2, 3, 4, 5, 6, 7, 8)  # token ids that every vocabulary has
_OUTPUT_TOKENS = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default=DEMO_MODEL, help="a directory or a Hub id")
    add("--dtype", default="auto", choices=DTYPES, help="dtype of the weights")
    add("--repeats", type=int, default=5, help="number of starts")
    add_out(parser)


def run(parsed: argparse.Namespace) -> int:
    """Start, measure and stop; print and write the tables."""
    if parsed.repeats < 1:
        raise ConfigError("--repeats must be at least 1")
    model = ProbedModel(model=parsed.model, dtype=parsed.dtype)
    startup = measure(model, repeats=parsed.repeats)
    data = figures(model, startup)
    publish(parsed.out, "startup", "Start of a server", markdown(model, startup), data)
    return 0


def measure(model: ProbedModel, *, repeats: int) -> Startup:
    """Start whole servers and single processes in turn."""
    imports = {process: import_times(process, model) for process in IMPORTS}
    starts: list[Start] = []
    alone: dict[str, list[dict[str, float]]] = {process: [] for process in IMPORTS}
    for _ in range(repeats):
        starts.append(start(model))
        for process, parts in alone.items():
            parts.append(start_alone(process, model))
    return Startup(starts=starts, alone=alone, imports=imports)


def start(model: ProbedModel) -> Start:
    """Start a server, wait for its first token, and stop it."""
    with server(model.model, ["--dtype", model.dtype]) as started:
        idle = started.memory()
        sent_s = time.perf_counter()
        first_token_s = asyncio.run(_ask(started, model)) - sent_s
        return Start(
            ready_s=started.ready_s, first_token_s=first_token_s, idle=idle, used=started.memory()
        )


async def _ask(started: Started, model: ProbedModel) -> float:
    """Complete a first request; return when its first token came. Raises ConfigError if it
    failed."""
    call = Call(
        model=model.model, max_tokens=_OUTPUT_TOKENS, ignore_eos=True, prompt_token_ids=_PROMPT
    )
    record = StreamRecord(scheduled_s=time.perf_counter(), expected_tokens=_OUTPUT_TOKENS)
    async with SseTransport(started.base_url, "completions") as transport:
        await transport.stream(call, record)
    if not record.is_clean or not record.event_times_s:
        raise ConfigError(f"the first request failed: {record.faults} {record.detail}")
    return record.event_times_s[0]


# -- what is said of it -------------------------------------------------------------------------

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
    """One start of a server: the memory of each process when ready (`idle`) and after a request."""

    ready_s: float  # from the start of its process to its ready line
    first_token_s: float  # from a first request, sent then, to its first token
    idle: Mapping[str, Memory]
    used: Mapping[str, Memory]


@dataclass(frozen=True, slots=True, kw_only=True)
class Startup:
    """Everything measured; `alone` has the seconds of each part, by process and start."""

    starts: Sequence[Start]
    alone: Mapping[str, Sequence[Mapping[str, float]]]
    imports: Mapping[str, Mapping[str, float]]  # by process, seconds by package, longest first


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
    def cells(name: str, seconds: float) -> tuple[str, str]:
        return name, f"{1e3 * seconds:,.0f}"

    header = [title for process in imports for title in (process, "ms")]
    longest = [
        [cells(*package) for package in list(packages.items())[:_NUM_PACKAGES]]
        for packages in imports.values()
    ]
    lines = [*zip_longest(*longest, fillvalue=("–", "–"))]
    lines.append(tuple(cells(_ALL, sum(packages.values())) for packages in imports.values()))
    return table(header, [[cell for pair in line for cell in pair] for line in lines])


def _memory_table(starts: Sequence[Start]) -> str:
    header = ("process", "resident", "proportional", "unique", "resident, used")
    sizes = ("resident_bytes", "proportional_bytes", "unique_bytes")
    columns = [_mebibytes([start.idle for start in starts], size) for size in sizes]
    columns.append(_mebibytes([start.used for start in starts], "resident_bytes"))
    rows = [[process, *(f"{column[process]:,.0f}" for column in columns)] for process in columns[0]]
    _, proportional, unique, _ = (f"{sum(column.values()):,.0f}" for column in columns)
    return table(header, [*rows, ["together", "–", proportional, unique, "–"]])


def _mebibytes(starts: Sequence[Mapping[str, Memory]], size: str) -> dict[str, float]:
    """The median of a size over all starts, by process."""
    return {
        process: statistics.median(getattr(start[process], size) for start in starts) / (1 << 20)
        for process in starts[0]
    }


def _median_and_range(values: Sequence[float]) -> tuple[str, str]:
    return f"{statistics.median(values):.2f}", f"{min(values):.2f}–{max(values):.2f}"
