"""Work that would stall the event loop for everybody goes to a thread."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from penstock.gateway.errors import RequestRefusedError

_MAX_THREADS = 2  # each may need 100 times a text's bytes, and the engine needs the cores
_MAX_OPEN = 64  # running and waiting; each has its text in memory
_Result = TypeVar("_Result")


async def off_loop(work: Callable[[], _Result], *, is_long: bool) -> _Result:
    """What `work` returns; a thread of its own costs more than short work does."""
    return await asyncio.to_thread(work) if is_long else work()


class LongWork:
    """Work on long texts: few at a time, in order of arrival, and no more waiting than there is
    memory for. Short work is done at once."""

    def __init__(self) -> None:
        num_threads = max(1, min(_MAX_THREADS, (os.cpu_count() or 1) // 2))
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="penstock-text")
        self._num_open = 0

    async def run(self, work: Callable[[], _Result], *, is_long: bool) -> _Result:
        """What `work` returns.

        Raises:
            RequestRefusedError: 503: too much waits.
        """
        if not is_long:
            return work()
        if self._num_open >= _MAX_OPEN:
            raise RequestRefusedError(
                f"{_MAX_OPEN} long prompts are being tokenised already",
                code="server_overloaded",
                status=503,
            )
        self._num_open += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._num_open -= 1

    def close(self) -> None:
        """Nothing more is begun."""
        self._threads.shutdown(wait=False, cancel_futures=True)
