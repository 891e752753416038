"""The commit, the machine, and paused garbage collection."""

from __future__ import annotations

import gc
import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def commit() -> str:
    """The checkout's commit, and whether it has changes; `""` outside a checkout."""
    head = _git("rev-parse", "--short=12", "HEAD")
    return f"{head} with changes" if head and _git("status", "--porcelain", "-uno") else head


def _git(*words: str) -> str:
    try:
        done = subprocess.run(  # noqa: S603
            ["git", *words],  # noqa: S607
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:  # there is no git
        return ""
    return done.stdout.strip()


def machine() -> dict[str, Any]:
    """What figures depend on most."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text("utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


@contextmanager
def frozen_garbage() -> Iterator[None]:
    """Exempt existing objects from garbage collection during the block, as the server does once it
    has started: collecting them would be a pause."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
