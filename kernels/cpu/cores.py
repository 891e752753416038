"""How many cores this process may keep busy, and which."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

_CPU_FOLDER = Path("/sys/devices/system/cpu")
_NODE_FOLDER = Path("/sys/devices/system/node")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cpus() -> set[int]:
    """The CPUs that this thread may run on; all, where the system does not say."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def keep_on(cpus: Iterable[int]) -> None:
    """Keep this thread, and those that it starts, on these CPUs, where the system can do so."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cpus)


def num_usable_cores() -> int:
    """Physical cores the process may run on, within the quota of its control group.

    Two hardware threads of one core share its multipliers, so a second one gains nothing.
    """
    return max(1, min(_num_physical(usable_cpus()), _quota(_QUOTA)))


def share_of_cores(index: int, num: int) -> list[int]:
    """The CPUs of one of `num` equal shares of those this process may run on: hardware threads of
    one core are in the same share, and a core is in several only if there are more shares."""
    by_core: dict[str, list[int]] = {}
    for cpu in sorted(usable_cpus()):
        by_core.setdefault(_siblings(_CPU_FOLDER / f"cpu{cpu}", cpu), []).append(cpu)
    cores = list(by_core.values())
    mine = cores[len(cores) * index // num : len(cores) * (index + 1) // num]
    return [cpu for core in mine or [cores[index % len(cores)]] for cpu in core]


def pin_rank(rank: int, num_ranks: int) -> int:
    """Keep this thread, and those that it starts, on its rank's NUMA nodes, if there are several;
    the number of ranks that share its cores."""
    usable = usable_cpus()
    nodes = [cpus for each in read_nodes(_NODE_FOLDER) if (cpus := each & usable)]
    if len(nodes) < 2:
        return num_ranks
    shares = [cpus_of_rank(each, num_ranks, nodes) for each in range(num_ranks)]
    keep_on(shares[rank])
    return shares.count(shares[rank])


def cpus_of_rank(rank: int, num_ranks: int, nodes: Sequence[set[int]]) -> set[int]:
    """Those of a rank's nodes: as many nodes for each rank, or as many ranks for each node."""
    first, end = (each * len(nodes) // num_ranks for each in (rank, rank + 1))
    return set().union(*nodes[first : max(first + 1, end)])


def read_nodes(folder: Path) -> list[set[int]]:
    """The CPUs of each NUMA node, from the system's files such as `node0/cpulist`: `0-3,8`."""
    nodes = sorted(folder.glob("node[0-9]*"), key=lambda path: int(path.name[4:]))
    return [_cpus((node / "cpulist").read_text()) for node in nodes]


def _cpus(text: str) -> set[int]:
    found: set[int] = set()
    for part in text.strip().split(",") if text.strip() else ():
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


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
