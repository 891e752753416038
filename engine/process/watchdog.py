"""Ends an engine whose step hangs: logs all stacks and the pool's state, then exits.

A thread checks the step loop once per tick. While there is work, it expects progress at every
check: a finished step, or a finished part of one. It counts checks, not seconds: a suspended
process makes none, and is not ended for it.

The thread needs the GIL, so with every check it also sends the supervisor a sign of life; the
supervisor ends an engine that sends none (`gateway.launch.child`). The exit is not `sys.exit`,
since the main thread is the one that hangs.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Protocol

from penstock.engine.process.launch import EXIT_STUCK

# No part of a working step comes near the default of `--step-timeout-s`, 300 s. In plain torch a
# layer of an 8B model is 1 TFLOP for 2,048 tokens, 20 s on a laptop at 50 GFLOP/s, and their prompt
# log-probabilities take 40 s; a call of the CPU kernels takes less. On a GPU the longest is the
# first step, if all Triton kernels must be compiled: about 100 s on slow cores. Loading a model and
# capturing graphs come before the watchdog starts. Ending too early is worse than too late: after
# three crashes a request fails.
_TICK_S, _MIN_TICK_S = 1.0, 0.01
_MIN_TICKS = 10
_LOG = logging.getLogger(__name__)


class Watched(Protocol):
    """What the watchdog checks; thread-safe."""

    def last_step_s(self) -> float | None:
        """When the last step ended, or work began; None while there is no work."""
        ...

    def num_parts_done(self) -> int:
        """A number that changes while a step makes progress."""
        ...

    def describe(self) -> str:
        """The device's state in words, for the log."""
        ...


class Watchdog(threading.Thread):
    """
    Args:
        timeout_s: maximum time without progress, while there is work.
        end: ends the process, with an exit code, once the log is written.
        show_life: called at every check.
    """

    def __init__(
        self,
        watched: Watched,
        *,
        timeout_s: float,
        end: Callable[[int], object],
        show_life: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(name="penstock-watchdog", daemon=True)
        self._watched = watched
        self._tick_s = max(_MIN_TICK_S, min(_TICK_S, timeout_s / _MIN_TICKS))
        self._max_still_ticks = math.ceil(timeout_s / self._tick_s)
        self._show_life = show_life
        self._end = end
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Stop checking."""
        self._stopped.set()
        self.join()

    def run(self) -> None:
        num_still_ticks = 0
        seen: tuple[float | None, int] | None = None
        while not self._stopped.wait(self._tick_s):
            self._show_life()
            last_step_s = self._watched.last_step_s()
            now = (last_step_s, self._watched.num_parts_done())
            num_still_ticks = 0 if last_step_s is None or now != seen else num_still_ticks + 1
            seen = now
            if num_still_ticks >= self._max_still_ticks:
                self._give_up(last_step_s)
                return

    def _give_up(self, last_step_s: float | None) -> None:
        try:
            self._log(0.0 if last_step_s is None else time.monotonic() - last_step_s)
        finally:
            self._end(EXIT_STUCK)

    def _log(self, still_s: float) -> None:
        _LOG.critical("no step has ended for %.0f s while requests run: the engine ends", still_s)
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, frame in sys._current_frames().items():
            _LOG.critical("thread %s, innermost call last:", names.get(ident, ident))
            for call in traceback.extract_stack(frame):
                _LOG.critical("  %s:%s in %s", call.filename, call.lineno, call.name)
        _LOG.critical("CPU pool: %s", self._watched.describe())


def heartbeat(fd: int) -> Callable[[], None]:
    """Writes a byte to a pipe, and never waits for its reader."""
    os.set_blocking(fd, False)

    def show_life() -> None:
        with contextlib.suppress(OSError):  # full, or the reader has died
            os.write(fd, b"\0")

    return show_life
