"""An event loop whose timers are right to some tens of microseconds.

epoll takes whole milliseconds, so asyncio's timers come up to one late, and uvloop's are whole
milliseconds too. select takes microseconds, and one epoll descriptor is all it has to watch.
"""

from __future__ import annotations

import asyncio
import select
import selectors
import sys


def new_precise_loop() -> asyncio.AbstractEventLoop:
    """asyncio's own loop; outside Linux its timers are fine as they are."""
    if sys.platform != "linux":
        return asyncio.SelectorEventLoop()
    return asyncio.SelectorEventLoop(_PreciseSelector())


if sys.platform == "linux":

    class _PreciseSelector(selectors.EpollSelector):
        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            if timeout is not None and timeout > 0:
                select.select([self.fileno()], [], [], timeout)
                timeout = 0
            return super().select(timeout)
