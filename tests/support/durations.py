"""How long tests take, and the CPU time that they and the processes they start use.

The plugin writes each test's CPU seconds into the JUnit report (`cpu_s`). As a command it prints
the slowest files and tests of such reports: `python -m tests.support.durations build/tests/*.xml`.
"""

from __future__ import annotations

import argparse
import os
import resource
from collections import defaultdict
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest

NUM_SLOWEST = 25
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def _living_children(pid: int | str) -> Iterable[str]:
    """Process ids of all living descendants. None where the kernel does not list them."""
    try:
        for path in Path(f"/proc/{pid}/task").iterdir():
            for child in (path / "children").read_text().split():
                yield child
                yield from _living_children(child)
    except (FileNotFoundError, ProcessLookupError):
        return


def cpu_s() -> float:
    """CPU seconds of this process and of its descendants, living and dead, so far."""
    total = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        total += usage.ru_utime + usage.ru_stime
    for child in _living_children("self"):
        try:
            # proc_pid_stat(5): utime, stime, and cutime, cstime of its own dead children.
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[11:15]
        except (FileNotFoundError, ProcessLookupError):
            continue
        total += sum(map(int, fields)) * _TICK_S
    return total


class CpuSeconds:
    """Gives each test's report the property `cpu_s`, set-up and tear-down included."""

    def __init__(self) -> None:
        self._before = cpu_s()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        if call.when == "teardown":
            now = cpu_s()
            item.user_properties.append(("cpu_s", f"{max(0, now - self._before):.3f}"))
            self._before = now
        return (yield)


@dataclass
class Duration:
    """Of a test, or the sums of a file's."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    num_tests: int = 0

    def add(self, other: Duration) -> None:
        self.wall_s += other.wall_s
        self.cpu_s += other.cpu_s
        self.num_tests += other.num_tests


def read(reports: Iterable[Path]) -> dict[tuple[str, str], Duration]:
    """By file and test, from JUnit reports."""
    durations: dict[tuple[str, str], Duration] = defaultdict(Duration)
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            cpu = case.find("properties/property[@name='cpu_s']")
            file = (case.attrib["classname"] or case.attrib["name"]).replace(".", "/")
            duration = Duration(
                float(case.attrib["time"]),
                float(cpu.attrib["value"]) if cpu is not None else 0.0,
                num_tests=1,
            )
            durations[file, case.attrib["name"]].add(duration)
    return durations


def table(durations: dict[tuple[str, str], Duration]) -> str:
    files: dict[str, Duration] = defaultdict(Duration)
    for (file, _), duration in durations.items():
        files[file].add(duration)
    total = Duration()
    for duration in files.values():
        total.add(duration)
    lines = [
        f"{total.num_tests} tests: {total.wall_s:.0f} s one by one, {total.cpu_s:.0f} s of CPU"
    ]

    def add(title: str, rows: Iterable[tuple[str, Duration]]) -> None:
        lines.append(f"\n{'wall s':>8}{'CPU s':>8}{'tests':>7}  slowest {title}")
        slowest = sorted(rows, key=lambda row: -row[1].wall_s)[:NUM_SLOWEST]
        lines.extend(f"{d.wall_s:8.1f}{d.cpu_s:8.1f}{d.num_tests:7}  {name}" for name, d in slowest)

    add("files", files.items())
    add("tests", ((f"{file}::{name}", d) for (file, name), d in durations.items()))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("reports", nargs="+", type=Path)
    print(table(read(parser.parse_args().reports)))


if __name__ == "__main__":
    main()
