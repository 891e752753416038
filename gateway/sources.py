"""The interface of everything that yields items over time: the outputs of an engine, the deltas of
a generation, the entries of a log.

On a token's path items are passed on by callbacks (`consume`), since waking a task costs more than
the token's own work. Elsewhere `next_of` is awaited.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Generic, Protocol, TypeVar

_T = TypeVar("_T")


class Source(Protocol[_T]):
    @property
    def is_over(self) -> bool:
        """Whether `take` has returned the last item."""
        ...

    def take(self) -> list[_T]:
        """All items since the last call; may be empty.

        Raises:
            Exception: the source has failed, and all its items were taken.
        """
        ...

    def when_ready(self, call: Callable[[], None]) -> bool:
        """Have `call` called once when `take` has something to return or to raise. False if it has
        already, or never will because the source is over: then nothing will be called. A call may
        come for nothing."""
        ...


async def next_of(source: Source[_T]) -> list[_T] | None:
    """The next items, as soon as there are some; None if the source is over.

    Raises:
        Exception: as `Source.take`.
    """
    while not source.is_over:
        if items := source.take():
            return items
        waiter = asyncio.get_running_loop().create_future()
        if source.when_ready(partial(_wake, waiter)):
            await waiter
    return None


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


async def consume(source: Source[_T], handle: Callable[[list[_T]], bool]) -> bool:
    """Pass items to `handle` as they come, without waking this task for them. True once the source
    is over, False when `handle` has returned False and there may be more.

    Raises:
        Exception: what the source or `handle` raises.
    """
    return await _Consumer(source, handle).run()


class _Consumer(Generic[_T]):
    __slots__ = ("_handle", "_is_over", "_source")

    def __init__(self, source: Source[_T], handle: Callable[[list[_T]], bool]) -> None:
        self._source = source
        self._handle = handle
        self._is_over: asyncio.Future[bool] | None = None  # while it runs

    async def run(self) -> bool:
        self._is_over = asyncio.get_running_loop().create_future()
        self._take()
        try:
            return await self._is_over
        finally:
            self._is_over = None  # an exception in it refers back to this object

    def _take(self) -> None:
        is_over, source = self._is_over, self._source
        if is_over is None or is_over.done():
            return  # a late callback
        try:
            while True:
                items = source.take()
                if items and not self._handle(items):
                    break
                if source.when_ready(self._take):
                    return
                if source.is_over:
                    break
        except Exception as error:  # belongs to the consumer, not to the code that called
            is_over.set_exception(error)
            return
        is_over.set_result(source.is_over)
