"""What memory is taken, and what is left to the garbage collector, which comes seldom to a gateway
(`gateway/launch/process.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable

_PATIENCE_S = 60.0


async def bytes_taken(work: Callable[[], Awaitable[None]]) -> int:
    """What is there after it that was not before, as Python allocated it."""
    gc.collect()
    tracemalloc.start()
    try:
        await work()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


@contextlib.asynccontextmanager
async def freed_without_collector(*kinds: type) -> AsyncIterator[None]:
    """Objects of these types that come up in the block are gone soon after it, though nobody
    collects garbage."""
    gc.collect()
    before = num_alive(*kinds)
    gc.disable()
    try:
        yield
        async with asyncio.timeout(_PATIENCE_S):
            while num_alive(*kinds) > before:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    finally:
        gc.enable()


def num_alive(*kinds: type) -> int:
    return sum(issubclass(type(each), kinds) for each in gc.get_objects())
