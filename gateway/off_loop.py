"""Work that would stall the event loop for everybody goes to a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

_Result = TypeVar("_Result")


async def off_loop(work: Callable[[], _Result], *, is_long: bool) -> _Result:
    """What `work` returns; a thread of its own costs more than short work does."""
    return await asyncio.to_thread(work) if is_long else work()
