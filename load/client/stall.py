"""Notices that a stream has gone silent, at the cost of one timer per stream and none per event."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from penstock.load.client.integrity import StreamCheck


class StallTimer:
    """Calls `on_stall` once, when a stream has had no event for `stall_s`.

    Args:
        check: knows when the last event came.
    """

    def __init__(self, check: StreamCheck, *, stall_s: float, on_stall: Callable[[], None]) -> None:
        self._check = check
        self._stall_s = stall_s
        self._on_stall = on_stall
        self._loop = asyncio.get_running_loop()
        self._handle = self._loop.call_later(stall_s, self._look)

    def cancel(self) -> None:
        self._handle.cancel()

    def _look(self) -> None:
        left_s = self._check.heard_s + self._stall_s - time.perf_counter()
        if left_s > 0:
            self._handle = self._loop.call_later(left_s, self._look)
        else:
            self._on_stall()
