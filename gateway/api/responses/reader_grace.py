"""Ends a response that nobody has read for too long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from penstock.gateway.storage.response_log.log import Run


class ReaderGrace:
    """Waits for readers of a response that runs here.

    Args:
        grace_s: how long the response continues without a reader.
        is_kept: readers can come back; otherwise it ends with its last reader.
        abandon: ends the response.
    """

    def __init__(
        self, run: Run, *, grace_s: float, is_kept: bool, abandon: Callable[[], None]
    ) -> None:
        self._run = run
        self._grace_s = grace_s
        self._is_kept = is_kept
        self._abandon = abandon
        self._has_been_read = False
        self._timer: asyncio.TimerHandle | None = None
        self._check: asyncio.Future[None] | None = None  # the event loop holds a weak reference

    def readers_changed(self) -> None:
        if self._run.log.readers:
            self._has_been_read = True
            self._stop_timer()
        elif self._has_been_read and not self._is_kept:
            self._abandon()
        elif self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._grace_s, self._check_elsewhere)

    def stop(self) -> None:
        """Abandon nothing any longer; from now on nothing refers back to the response's task."""
        self._abandon = _nothing
        self._stop_timer()
        if self._check is not None:
            self._check.cancel()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_elsewhere(self) -> None:
        self._check = asyncio.ensure_future(self._abandon_unless_read())

    async def _abandon_unless_read(self) -> None:
        timer = self._timer
        is_read = await self._run.is_read_elsewhere()
        if self._timer is not timer or not self._run.is_current:
            return  # a reader came meanwhile, or the response has ended
        self._timer = None
        if is_read:
            self.readers_changed()
        else:
            self._abandon()


def _nothing() -> None:
    pass
