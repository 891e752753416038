"""What every rival is to the comparison, ours too: something that starts, is measured and stops."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import psutil

from penstock.load.peers.workloads import Workload
from penstock.load.workloads.driver import RunResult


class RivalError(Exception):
    """A rival did not start, or ended while it was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One way to start a rival. Of several that fit a workload, the fastest counts.

    Attributes:
        flags: what the rival is started with; in process, the options of its library.
        workloads: those it is meant for; empty: all.
    """

    name: str
    flags: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    workloads: frozenset[str] = frozenset()

    def fits(self, workload: str) -> bool:
        return not self.workloads or workload in self.workloads

    def __str__(self) -> str:
        """As on a command line: what the report says."""
        words = [*(f"{key}={value}" for key, value in self.env.items()), *self.flags]
        return " ".join([f"{self.name}:", *words]) if words else self.name


class Running(Protocol):
    """A rival that is ready.

    Attributes:
        ready_s: from the making of its process.
        process: the first of its processes.
    """

    ready_s: float
    process: psutil.Process

    def measure(self, workload: Workload) -> RunResult:
        """
        Raises:
            RivalError: it ended, or took too long.
        """
        ...

    def stop(self) -> None:
        """End all its processes, by force if it must be."""
        ...


class Rival(Protocol):
    """Attributes:
    name: in the results.
    title: for people.
    """

    name: str
    title: str

    def prepare(self, model: str) -> str:
        """Make its environment and its form of the model; its version.

        Raises:
            InstallError: it cannot be had here.
        """
        ...

    def settings(self, model: str) -> Sequence[Setting]: ...

    def start(self, model: str, setting: Setting) -> Running:
        """
        Raises:
            RivalError: it did not start.
        """
        ...


def cpu_s(processes: Iterable[psutil.Process]) -> dict[str, float]:
    """Processor seconds so far, by the processes' names; equal names are added up.

    A process that has given itself no name is `main`.
    """
    found: dict[str, float] = {}
    for process in processes:
        try:
            times, name = process.cpu_times(), process.name()
        except psutil.NoSuchProcess:
            continue
        name = "main" if name.startswith("python") else name
        found[name] = found.get(name, 0.0) + times.user + times.system
    return found


def memory_bytes(processes: Iterable[psutil.Process]) -> int:
    """What they hold together: a page that several share counts once."""
    total = 0
    for process in processes:
        try:
            total += process.memory_full_info().pss
        except psutil.NoSuchProcess:
            continue
    return total
