"""Gives back to the system what was needed once and is free now.

glibc keeps freed memory for the next request of it: after six prompts of 4 MB that were several
hundred MB, for good.
"""

from __future__ import annotations

import asyncio
import ctypes
import resource
from collections.abc import Callable
from pathlib import Path

_LOOK_S = 1.0
_MAX_PAUSE_S = 30.0  # between two tries that give nothing
_STEP_BYTES = 16 << 20  # less than that is not worth it
_STATM = Path("/proc/self/statm")


async def trim_memory() -> None:
    """Look every second, for ever, and trim where memory has grown; ends at once where the C
    library has no `malloc_trim`."""
    trim = _malloc_trim()
    if trim is None:
        return
    floor, pause_s = resident_bytes(), _LOOK_S
    while True:
        await asyncio.sleep(pause_s)
        before = resident_bytes()
        floor = min(floor, before)
        if before < floor + _STEP_BYTES:
            pause_s = _LOOK_S
            continue
        await asyncio.to_thread(trim)
        is_worth_it = before - resident_bytes() >= _STEP_BYTES
        # What is in use cannot be given back, and may be in use for hours.
        pause_s = _LOOK_S if is_worth_it else min(2 * pause_s, _MAX_PAUSE_S)


def resident_bytes() -> int:
    """Of this process, now (Linux)."""
    return int(_STATM.read_text().split()[1]) * resource.getpagesize()


def _malloc_trim() -> Callable[[], object] | None:
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return None if malloc_trim is None or not _STATM.exists() else lambda: malloc_trim(0)
