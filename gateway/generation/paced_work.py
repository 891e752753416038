"""Work of requests that holds Python's lock: validating and rewriting large schemas, validating and
rendering thousands of messages.

In a thread it would still slow the event loop to half its speed. So one thread does it, tenants
take turns with it, and it rests in between: it may do `_BURST_S` at once, and `_SHARE` of the time
in the long run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from penstock.gateway.errors import RequestRefusedError
from penstock.gateway.generation.turns import NoTurnError, Turns
from penstock.gateway.telemetry.request_record import CURRENT_REQUEST

MAX_OPEN = 64  # pieces that are being done or wait; each keeps its request in memory
LARGE = 512  # parts of JSON; validating and rewriting as many takes about 5 ms
_SHARE = 0.15  # of the time that the event loop could use
_BURST_S = 0.2
_CHARS_OF_PART = 64
_CHARS_OF_JSON = 16  # a schema may be a text
# Their texts are only passed on.
_TEXTS = frozenset({"prompt", "messages", "input", "suffix", "prediction", "instructions"})
_IDS = frozenset({"prompt", "allowed_token_ids", "stop_token_ids"})
_SHIFT_OF_IDS, _SHIFT_OF_VALUES = 6, 2  # 64 ids of tokens, or 4 values of a schema, are a part
_GBNF = "::="  # it is rewritten to Lark, character by character
# What takes long in a small schema: rewriting patterns with look-around, listing values.
_COSTLY = ("(?=", "(?!", "(?<")
_COSTLY_KEYS = frozenset({"propertyNames", "uniqueItems", "oneOf", "$ref"})
_PARTS_OF_COSTLY = LARGE // 4
_Result = TypeVar("_Result")


class PacedWork:
    """Does one piece at a time.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="penstock-requests")
        self._turns = Turns(MAX_OPEN)
        self._running = set[asyncio.Task[None]]()
        self._clock = clock
        self._left_s = _BURST_S
        self._since_s = clock()

    async def run(self, work: Callable[[], _Result], *, size: int) -> _Result:
        """What `work` returns, or raises.

        Args:
            size: see `Turns`.

        Raises:
            RequestRefusedError: 503: too much is waiting, most of it this tenant's.
        """
        record = CURRENT_REQUEST.get()
        tenant = (record.tenant if record is not None else None) or ""
        done = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._do(work, done, tenant, size))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            result: _Result = await done
        except NoTurnError as error:
            raise RequestRefusedError(
                f"{MAX_OPEN} large requests are already being prepared",
                code="server_overloaded",
                status=503,
            ) from error
        return result

    async def run_if_large(self, work: Callable[[], _Result], *, size: int) -> _Result:
        """`run`; but what is small is done at once.

        Args:
            size: by `work_of`.
        """
        return work() if size < LARGE else await self.run(work, size=size)

    def rest_s(self, spent_s: float) -> float:
        """How long to rest after work that took so long."""
        now_s = self._clock()
        earned_s = (now_s - self._since_s) * _SHARE
        self._left_s = min(self._left_s + earned_s, _BURST_S) - spent_s
        self._since_s = now_s
        return max(-self._left_s / _SHARE, 0.0)

    def close(self) -> None:
        """Drop work that has not begun."""
        for task in self._running:
            task.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _do(
        self, work: Callable[[], Any], done: asyncio.Future[Any], tenant: str, size: int
    ) -> None:
        try:
            async with self._turns.turn(tenant, size):
                if done.done():  # who wanted it has left
                    return
                loop = asyncio.get_running_loop()
                *outcome, spent_s = await loop.run_in_executor(self._thread, _timed, work)
                _settle(done, *outcome)
                await asyncio.sleep(self.rest_s(spent_s))
        except NoTurnError as error:
            _settle(done, error=error)
        finally:
            done.cancel()  # does nothing if it is done


def _timed(work: Callable[[], Any]) -> tuple[Any, Exception | None, float]:
    """The result, or the error, and the seconds that it took, also those in which other processes
    had the core: the thread may have kept Python's lock meanwhile."""
    begin_s, result, failure = time.perf_counter(), None, None
    try:
        result = work()
    except Exception as error:
        failure = error
    return result, failure, time.perf_counter() - begin_s


def _settle(
    done: asyncio.Future[Any], result: object = None, error: Exception | None = None
) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(result)
    else:
        done.set_exception(error)


def work_of(body: Mapping[str, Any]) -> int:
    """About how much validating a request's JSON takes, in parts of it; counted up to `LARGE`."""
    num = 0
    for name, value in body.items():
        has_texts = name in _TEXTS
        shift = _SHIFT_OF_IDS if name in _IDS else _SHIFT_OF_VALUES
        waiting = [value]
        while waiting:
            if num >= LARGE:
                return LARGE
            each = waiting.pop()
            num += 1
            if isinstance(each, dict):
                waiting += each.values()
                if not has_texts:
                    num += _PARTS_OF_COSTLY * len(_COSTLY_KEYS & each.keys())
            elif isinstance(each, list):
                num += len(each) >> shift
                waiting += [item for item in each[:LARGE] if isinstance(item, dict | list | str)]
            elif isinstance(each, str) and not has_texts:
                is_json = each.lstrip()[:1] in ("{", "[")
                num += len(each) // (_CHARS_OF_JSON if is_json else _CHARS_OF_PART)
                if _GBNF in each:
                    num += len(each)
                if any(mark in each for mark in _COSTLY):
                    num += _PARTS_OF_COSTLY
    return num
