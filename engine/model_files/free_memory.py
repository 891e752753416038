"""How much memory the machine, or the control group, has free."""

from __future__ import annotations

import os
from pathlib import Path


def free_cpu_bytes() -> int:
    """Free memory of the machine, or of this process's control group if that is less."""
    free = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    free.extend(
        int(line.split()[1]) * 1024
        for line in _lines(Path("/proc/meminfo"))
        if line.startswith("MemAvailable:")
    )
    group = Path("/sys/fs/cgroup")
    limit, used = (_lines(group / name) for name in ("memory.max", "memory.current"))
    if limit and used and limit[0] != "max":
        free.append(max(0, int(limit[0]) - int(used[0])))
    return min(free)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
