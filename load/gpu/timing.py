"""Seconds that a call takes a device, from cold caches: the median of many.

Between two timed calls a buffer larger than any cache is read, not written: what is left dirty in a
cache would be written back in the time of what is measured. It also keeps the device busy while
the next call is launched, so that launching is in no time. On a CPU the clock is the wall's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

_NUM_WARM_UPS = 3  # the first compiles


class Timer:
    """A stopwatch for one device.

    Args:
        flush_bytes: read between calls.
        num_repeats: timed calls.
    """

    def __init__(self, device: torch.device, *, flush_bytes: int, num_repeats: int) -> None:
        self._device = device
        self._num_repeats = num_repeats
        self._flushed = torch.ones(flush_bytes // 4, device=device)
        self._sum = torch.empty((), device=device)

    def median_s(self, call: Callable[[], object]) -> float:
        """Seconds of one call from launch to end, everything before it done."""
        for _ in range(_NUM_WARM_UPS if self._device.type == "cuda" else 1):
            call()
        if self._device.type == "cuda":
            return statistics.median(self._on_stream(call))
        return statistics.median(self._on_wall(call) for _ in range(self._num_repeats))

    def wall_s(self, call: Callable[[], object]) -> float:
        """The same by the wall's clock, with launching: for calls that use several streams."""
        call()
        return statistics.median(self._on_wall(call) for _ in range(self._num_repeats))

    def _on_stream(self, call: Callable[[], object]) -> list[float]:
        cuda: Any = torch.cuda
        moments = [
            (cuda.Event(enable_timing=True), cuda.Event(enable_timing=True))
            for _ in range(self._num_repeats)
        ]
        torch.cuda.synchronize()
        for start, end in moments:
            self._flush()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in moments]

    def _on_wall(self, call: Callable[[], object]) -> float:
        self._flush()
        self._wait()
        began_s = time.perf_counter()
        call()
        self._wait()
        return time.perf_counter() - began_s

    def _flush(self) -> None:
        torch.sum(self._flushed, dim=0, out=self._sum)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
