"""Who is next for work of which only one piece is done at a time: tenants in turn, of each the
smallest piece first."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


class NoTurnError(Exception):
    """Too many are waiting, and this one's tenant has the most of them."""


@dataclass(slots=True, order=True)
class _Waiting:
    size: int
    number: int
    begin: asyncio.Future[None] = field(compare=False)


class Turns:
    """
    Args:
        max_open: pieces that are being done or wait. One more displaces the largest that waits of
            the tenant with the most, which may be itself. So a tenant that fills the queue takes no
            place from another one.
    """

    def __init__(self, max_open: int) -> None:
        self._max_waiting = max_open - 1
        self._waiting: OrderedDict[str, list[_Waiting]] = OrderedDict()  # next tenant first
        self._num_seen = 0
        self._is_taken = False

    def __len__(self) -> int:
        """Number of pieces that wait."""
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def turn(self, tenant: str, size: int) -> AsyncIterator[None]:
        """Wait for the turn, and have it within the block.

        Args:
            size: about as much work as this; less comes first.

        Raises:
            NoTurnError: the queue is full, or another one took the place.
        """
        await self._begin(tenant, size)
        try:
            yield
        finally:
            self._next()

    async def _begin(self, tenant: str, size: int) -> None:
        if not self._is_taken:
            self._is_taken = True
            return
        self._num_seen += 1
        new = _Waiting(size, self._num_seen, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(tenant, []).append(new)
        if len(self) > self._max_waiting:
            self._displace()
        try:
            await new.begin
        except asyncio.CancelledError:
            if new.begin.done() and not new.begin.cancelled() and new.begin.exception() is None:
                self._next()  # it was given the turn just now
            else:
                self._forget(tenant, new)
            raise

    def _displace(self) -> None:
        most = max(self._waiting, key=lambda tenant: len(self._waiting[tenant]))
        largest = max(self._waiting[most])
        self._forget(most, largest)
        largest.begin.set_exception(NoTurnError())

    def _forget(self, tenant: str, waiting: _Waiting) -> None:
        theirs = self._waiting.get(tenant, [])
        if waiting in theirs:
            theirs.remove(waiting)
            if not theirs:
                del self._waiting[tenant]

    def _next(self) -> None:
        if not self._waiting:
            self._is_taken = False
            return
        tenant, theirs = next(iter(self._waiting.items()))
        smallest = min(theirs)
        self._waiting.move_to_end(tenant)
        self._forget(tenant, smallest)
        smallest.begin.set_result(None)
