"""The interface of everything that yields items over time: the outputs of an engine, the deltas of
a generation, the entries of a log.

On a token's path consumers use callbacks, since waking a task costs more than the token's own work.
The others await `next_of`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

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
        already: then nothing will be called. A call may come for nothing."""
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
