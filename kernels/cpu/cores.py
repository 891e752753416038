"""How many cores this process may keep busy."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path

_CPU_FOLDER = Path("/sys/devices/system/cpu")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def num_usable_cores() -> int:
    """Physical cores the process may run on, within the quota of its control group.

    Two hardware threads of one core share its multipliers, so a second one gains nothing.
    """
    has_affinity = hasattr(os, "sched_getaffinity")
    cpus = os.sched_getaffinity(0) if has_affinity else range(os.cpu_count() or 1)
    return max(1, min(_num_physical(cpus), _quota(_QUOTA)))


def share_of_cores(index: int, num: int) -> list[int]:
    """The CPUs of one of `num` equal shares of those this process may run on: hardware threads of
    one core are in the same share, and a core is in several only if there are more shares."""
    by_core: dict[str, list[int]] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        by_core.setdefault(_siblings(_CPU_FOLDER / f"cpu{cpu}", cpu), []).append(cpu)
    cores = list(by_core.values())
    mine = cores[len(cores) * index // num : len(cores) * (index + 1) // num]
    return [cpu for core in mine or [cores[index % len(cores)]] for cpu in core]


def _num_physical(cpus: Iterable[int]) -> int:
    return len({_siblings(_CPU_FOLDER / f"cpu{cpu}", cpu) for cpu in cpus})


def _siblings(folder: Path, cpu: int) -> str:
    """The hardware threads of a CPU's core, as the system lists them; else the CPU itself."""
    try:
        return (folder / "topology" / "thread_siblings_list").read_text()
    except OSError:
        return str(cpu)


def _quota(path: Path) -> int:
    """The control group's CPU quota in cores, rounded up; a large number if unlimited."""
    try:
        quota, period = path.read_text().split()
        return math.ceil(int(quota) / int(period))
    except (OSError, ValueError):  # no such file, or "max"
        return 1 << 16
