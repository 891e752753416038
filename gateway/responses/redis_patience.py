"""How long Redis is waited for: by this process's event loop, which may be late itself."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from penstock.gateway.redis_errors import RedisAwayError

_Result = TypeVar("_Result")


async def in_time(
    work: Coroutine[Any, Any, _Result], timeout_s: float, *, num_ticks: int
) -> _Result:
    """What `work` returns, or raises.

    The time is counted in turns of the loop, `num_ticks` of them at least, so that a process that
    was stopped, or busy, does not take its own absence for Redis'.

    Raises:
        RedisAwayError: the time is over; `work` is cancelled.
    """
    task = asyncio.ensure_future(work)
    try:
        for _ in range(num_ticks):
            await asyncio.wait({task}, timeout=timeout_s / num_ticks)
            if task.done():
                return task.result()
        raise RedisAwayError(f"no answer within {timeout_s} s")
    finally:
        task.cancel()
