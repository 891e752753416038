"""What requests have used, by day and API key: the contract, and where it is kept.

    a request's end ──► record ──► Ledger ──► the sums of its day, tenant and key

A record is stored before anybody is told of the end, so that the sums have whatever a client was
told, also after a process was killed. A response that another gateway takes over may be recorded by
both: of the records of one id, the newest epoch's last one counts (`replica.Replica.epoch`), and so
each response counts once, with the numbers that its end has.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Sequence
from datetime import UTC, date, datetime
from operator import add
from typing import Any, Protocol

import msgspec

from penstock.gateway.storage.conversations.store import StoreUnavailableError

_LOG = logging.getLogger(__name__)
_EPOCH_DAY = date(1970, 1, 1).toordinal()
_PATIENCE_S = 0.25  # for which the end of a request waits for a store that is away
_RETRY_S = 1.0
_CLOSE_S = 2.0
_MAX_AT_ONCE = 256  # records of a write
_MAX_WAITING = 100_000  # records for a store that is away; then the oldest are dropped


class Counts(msgspec.Struct, frozen=True, array_like=True):
    """What requests have used. All are whole numbers, so that sums are exact.

    Attributes:
        cached_tokens: of the prompts, found in the KV cache; `host_cached_tokens` of them in host
            memory.
        compute_us, block_us: see `engine.request.Spent`.
    """

    num_requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    host_cached_tokens: int = 0
    output_tokens: int = 0
    thinking_tokens: int = 0
    compute_us: int = 0
    block_us: int = 0

    def plus(self, other: Counts) -> Counts:
        return Counts(*map(add, self.numbers, other.numbers))

    @property
    def numbers(self) -> tuple[int, ...]:
        numbers: tuple[int, ...] = msgspec.structs.astuple(self)
        return numbers

    @property
    def beyond_openai(self) -> dict[str, Any]:
        """What `usage` in OpenAI's form has no field for."""
        return {
            "cached_tokens": {
                "device": self.cached_tokens - self.host_cached_tokens,
                "host": self.host_cached_tokens,
            },
            "thinking_tokens": self.thinking_tokens,
            "compute_seconds": self.compute_us / 1e6,
            "kv_block_seconds": self.block_us / 1e6,
        }


class UsageRecord(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What one request has used.

    Attributes:
        id: the request's.
        key_id: of the API key; empty: there was none.
        day: of its end, in UTC: days since 1970.
        epoch: of the gateway that recorded it.
        may_move: another gateway, or a later process, may record it again.
    """

    id: str
    tenant: str
    key_id: str
    day: int
    counts: Counts
    epoch: int = 1
    may_move: bool = False


class KeyUsage(msgspec.Struct, frozen=True):
    """What one API key's requests of one day have used."""

    day: int
    tenant: str
    key_id: str
    counts: Counts


Noted = asyncio.Future[None] | None  # done when a record is stored; None: it is


async def settled(noted: Noted) -> None:
    """Wait until a record is stored; while the store is away, only for a moment."""
    if noted is not None and not noted.done():
        await asyncio.wait((noted,), timeout=_PATIENCE_S)


class Ledger(Protocol):
    """Records what requests use."""

    def note(self, record: UsageRecord) -> Noted:
        """Record it, as soon as the store is there."""
        ...

    async def days(self, first: int, last: int, *, tenant: str | None) -> list[KeyUsage]:
        """The sums of these days, in order of day, tenant and key.

        Args:
            tenant: whose; None: everybody's.

        Raises:
            StoreUnavailableError: they cannot be read now.
        """
        ...

    async def close(self) -> None:
        """Store what waits."""
        ...


def day_of(time_s: float) -> int:
    """The day, in UTC, of a Unix time."""
    return int(time_s // 86400)


def day_named(text: str) -> int:
    """The day of `YYYY-MM-DD`. Raises: ValueError."""
    day = date.fromisoformat(text).toordinal() - _EPOCH_DAY
    if name_of(day) != text:  # `fromisoformat` reads other forms, too
        raise ValueError("not of this form")
    return day


def name_of(day: int) -> str:
    return date.fromordinal(day + _EPOCH_DAY).isoformat()


def begin_of(day: int) -> int:
    """Unix time of a day's begin."""
    return int(datetime.fromordinal(day + _EPOCH_DAY).replace(tzinfo=UTC).timestamp())


class MemoryLedger:
    """In this process's memory. No other process takes its responses over, so that nothing is
    recorded twice.

    Args:
        num_days: for which sums are kept.
    """

    def __init__(self, *, num_days: int) -> None:
        self._num_days = num_days
        self._sums: dict[tuple[int, str, str], Counts] = {}
        self._today = 0

    def note(self, record: UsageRecord) -> None:
        key = record.day, record.tenant, record.key_id
        known = self._sums.get(key)
        self._sums[key] = record.counts if known is None else known.plus(record.counts)
        if record.day > self._today:
            self._today = record.day
            for old in [each for each in self._sums if each[0] <= record.day - self._num_days]:
                del self._sums[old]

    async def days(self, first: int, last: int, *, tenant: str | None) -> list[KeyUsage]:
        return [
            KeyUsage(day, owner, key_id, counts)
            for (day, owner, key_id), counts in sorted(self._sums.items(), key=lambda each: each[0])
            if first <= day <= last and tenant in (None, owner)
        ]

    async def close(self) -> None:
        """There is nothing to store."""


class UsageStore(Protocol):
    """Where sums are kept beyond this process."""

    async def put(self, records: Sequence[UsageRecord]) -> None:
        """Add records to the sums of their days. Of several records of one id that may move, those
        of an older epoch are ignored, and each other one replaces the one before.

        Raises:
            StoreUnavailableError: nothing was stored, or perhaps all was; the same records can be
                put again.
        """
        ...

    async def days(self, first: int, last: int, *, tenant: str | None) -> list[KeyUsage]:
        """As `Ledger.days`."""
        ...


class StoredLedger:
    """Writes records to a store: what comes while one write runs is the next one.

    Attributes:
        num_lost: records that were dropped, as the store was away for too long.
    """

    def __init__(self, store: UsageStore) -> None:
        self.num_lost = 0
        self._store = store
        self._waiting: deque[tuple[UsageRecord, asyncio.Future[None]]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._is_away = False

    def note(self, record: UsageRecord) -> Noted:
        stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if len(self._waiting) >= _MAX_WAITING:
            self._waiting.popleft()
            self.num_lost += 1
        self._waiting.append((record, stored))
        if self._task is None:
            self._task = asyncio.create_task(self._write(), name="store usage")
        return None if self._is_away else stored

    async def _write(self) -> None:
        try:
            while self._waiting:
                batch = [self._waiting[i] for i in range(min(len(self._waiting), _MAX_AT_ONCE))]
                try:
                    await self._store.put([record for record, _ in batch])
                except StoreUnavailableError as error:
                    if not self._is_away:
                        _LOG.warning("usage cannot be stored now, and will be later: %s", error)
                    self._is_away = True
                    await asyncio.sleep(_RETRY_S)
                    continue
                self._is_away = False
                for each in batch:
                    if self._waiting and self._waiting[0] is each:  # it was not dropped meanwhile
                        self._waiting.popleft()
                    if not each[1].done():
                        each[1].set_result(None)
        finally:
            self._task = None

    async def days(self, first: int, last: int, *, tenant: str | None) -> list[KeyUsage]:
        if self._task is not None:  # so that what has ended is among them
            await asyncio.wait((self._task,), timeout=_PATIENCE_S)
        return await self._store.days(first, last, tenant=tenant)

    async def close(self) -> None:
        task = self._task
        if task is None:
            return
        await asyncio.wait((task,), timeout=_CLOSE_S)
        if not task.done():
            _LOG.warning("the usage of %d requests could not be stored", len(self._waiting))
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


def today() -> int:
    return day_of(time.time())
