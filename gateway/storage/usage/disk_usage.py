"""The sums of usage in the database on disk."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import msgspec

from penstock.gateway.storage.conversations.store import store_unavailable
from penstock.gateway.storage.disk import Disk, DiskError
from penstock.gateway.storage.usage.ledger import Counts, KeyUsage, UsageRecord, day_of

_COUNTS = Counts.__struct_fields__
_MARKS = ", ".join("?" * len(_COUNTS))
_SUMS = ", ".join(f"{name} = {name} + excluded.{name}" for name in _COUNTS)
_TOLD_S = 86400.0  # for which it is known that a response was recorded
SCHEMA = f"""
CREATE TABLE usage (
    day INTEGER NOT NULL,
    tenant TEXT NOT NULL,
    key_id TEXT NOT NULL,
    {", ".join(f"{name} INTEGER NOT NULL" for name in _COUNTS)},
    PRIMARY KEY (day, tenant, key_id)
) WITHOUT ROWID;
CREATE TABLE usage_recorded (
    id TEXT PRIMARY KEY,
    stored_s REAL NOT NULL,
    record BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX usage_recorded_by_time ON usage_recorded (stored_s);
"""
_T = TypeVar("_T")
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(UsageRecord).decode


class DiskUsage:
    """A `UsageStore`.

    Args:
        disk: with the tables of `SCHEMA`.
        num_days: for which sums are kept.
        clock: seconds since the epoch.
    """

    def __init__(
        self, disk: Disk, *, num_days: int, clock: Callable[[], float] = time.time
    ) -> None:
        self._disk = disk
        self._num_days = num_days
        self._clock = clock
        self._pruned_s = 0.0

    async def put(self, records: Sequence[UsageRecord]) -> None:
        now_s = self._clock()
        is_prune_due = now_s - self._pruned_s >= _TOLD_S / 24

        def job(connection: sqlite3.Connection) -> None:
            for record in records:
                if record.may_move:
                    known = _recorded(connection, record.id)
                    if known is not None and known.epoch > record.epoch:
                        continue
                    if known is not None:
                        _add(connection, known, sign=-1)
                    row = record.id, now_s, _encode(record)
                    connection.execute(
                        "INSERT OR REPLACE INTO usage_recorded VALUES (?, ?, ?)", row
                    )
                _add(connection, record)
            if is_prune_due:
                last = day_of(now_s) - self._num_days
                connection.execute("DELETE FROM usage WHERE day <= ?", (last,))
                connection.execute(
                    "DELETE FROM usage_recorded WHERE stored_s <= ?", (now_s - _TOLD_S,)
                )

        await self._answered(self._disk.run(job))
        if is_prune_due:
            self._pruned_s = now_s

    async def days(self, first: int, last: int, *, tenant: str | None) -> list[KeyUsage]:
        def job(connection: sqlite3.Connection) -> list[KeyUsage]:
            query = f"SELECT day, tenant, key_id, {', '.join(_COUNTS)} FROM usage"
            found = connection.execute(
                f"{query} WHERE day BETWEEN ? AND ? AND (? IS NULL OR tenant = ?)"
                " ORDER BY day, tenant, key_id",
                (first, last, tenant, tenant),
            )
            return [
                KeyUsage(day, owner, key_id, Counts(*counts))
                for day, owner, key_id, *counts in found
            ]

        return await self._answered(self._disk.look(job))

    async def _answered(self, work: Coroutine[Any, Any, _T]) -> _T:
        try:
            return await work
        except DiskError as error:
            raise store_unavailable(str(error)) from error


def _recorded(connection: sqlite3.Connection, record_id: str) -> UsageRecord | None:
    query = "SELECT record FROM usage_recorded WHERE id = ?"
    found = connection.execute(query, (record_id,)).fetchone()
    return None if found is None else _decode(found[0])


def _add(connection: sqlite3.Connection, record: UsageRecord, *, sign: int = 1) -> None:
    numbers = [sign * number for number in record.counts.numbers]
    connection.execute(
        f"INSERT INTO usage VALUES (?, ?, ?, {_MARKS})"
        f" ON CONFLICT (day, tenant, key_id) DO UPDATE SET {_SUMS}",
        (record.day, record.tenant, record.key_id, *numbers),
    )
