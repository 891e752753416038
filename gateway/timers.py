"""Timers that end a connection: never before what has arrived on it was read.

A process that stood still (SIGSTOP, a suspended laptop, a machine with too much to do) finds its
timers due when it goes on, and uvloop runs those before it looks at its sockets. To close a
connection then would reset it under a request that came in time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ClassVar

MAX_STALL_S = 10.0
_TURN_S = 0.001  # a turn of the event loop at least


def after_reading(
    loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *args: object
) -> asyncio.TimerHandle:
    """Call `callback` in the loop's next turn: it polls its sockets before it runs a timer."""
    return loop.call_later(_TURN_S, callback, *args)


class StallTimer:
    """Runs while a transport's buffer is full: a reader that does not keep up is let go, so that it
    comes back and resumes.

    What it has not read stays in its response's log; on its connection there is never more than the
    transport's buffer (64 KiB). If that does not drain for a while, the connection ends.

    Attributes:
        num_stalled: connections of this process that were let go.
    """

    __slots__ = ("_loop", "_timer")
    num_stalled: ClassVar[int] = 0

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None

    def start(self, max_stall_s: float, on_stall: Callable[[], None]) -> None:
        """The buffer is full: it has so long to drain.

        What is to be done then is kept only while the timer runs: a connection and its timer must
        not hold each other once it has ended.
        """
        if self._timer is None:
            self._timer = self._loop.call_later(max_stall_s, self._expire, on_stall)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self, on_stall: Callable[[], None]) -> None:
        self._timer = after_reading(self._loop, _let_go, on_stall)


def _let_go(on_stall: Callable[[], None]) -> None:
    StallTimer.num_stalled += 1
    on_stall()
