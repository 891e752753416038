"""Ends an engine whose step does not end: stacks and the pool's state into the log, then exit.

A thread looks at the step loop once a tick. While there is work it expects something new at every
look: a step that ended, or a part of one that is done. Looks are counted, not seconds: a process
that stood still makes none meanwhile, and is not ended for it.

The thread needs the interpreter's lock. So with every look it also gives the supervisor a sign of
life, which ends an engine that gives none (`gateway.launch.child`). The exit is not `sys.exit`: the
thread that would have to end is the one that cannot.
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

from penstock.engine.process import EXIT_STUCK

# No part of an honest step comes near it. In plain torch a layer of an 8B model is 1 TFLOP for
# 2,048 tokens, 20 s on a laptop at 50 GFLOP/s, and their prompt log-probabilities take 40 s; a call
# of the CPU's kernels takes less. On a GPU the longest is the first step, if all Triton kernels are
# to be compiled: about 100 s on slow cores. Loading a model and capturing graphs come before there
# is a watchdog. An end too early is worse than one too late: after three a request fails.
DEFAULT_STEP_TIMEOUT_S = 300.0
_TICK_S, _MIN_TICK_S = 1.0, 0.01
_MIN_TICKS = 10
_LOG = logging.getLogger(__name__)


class Watched(Protocol):
    """What the watchdog looks at; any thread may ask."""

    def last_step_s(self) -> float | None:
        """When the last step ended, or work began after none; None while there is no work."""
        ...

    def num_parts_done(self) -> int:
        """Another number than before where a step gets on."""
        ...

    def describe(self) -> str:
        """The device's state in words, for the log."""
        ...


class Watchdog(threading.Thread):
    """
    Args:
        timeout_s: without anything new, while there is work.
        end: ends the process, with an exit code, once the log is written.
        show_life: called at every look.
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
        """Look no more."""
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
            for place in traceback.extract_stack(frame):
                _LOG.critical("  %s:%s in %s", place.filename, place.lineno, place.name)
        _LOG.critical("CPU pool: %s", self._watched.describe())


def life_line(fd: int) -> Callable[[], None]:
    """Writes a byte to a pipe, and never waits for its reader."""
    os.set_blocking(fd, False)

    def show_life() -> None:
        with contextlib.suppress(OSError):  # full, or the reader is gone and so shall we be
            os.write(fd, b"\0")

    return show_life
