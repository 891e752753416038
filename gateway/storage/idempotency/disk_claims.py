"""Claims in the database on disk."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from penstock.gateway.storage.conversations.store import store_unavailable
from penstock.gateway.storage.disk import Disk, DiskError
from penstock.gateway.storage.idempotency.claims import Claim, decode_claim, encode_claim

SCHEMA = """
CREATE TABLE claims (
    key TEXT PRIMARY KEY,
    stored_s REAL NOT NULL,
    claim BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX claims_by_time ON claims (stored_s);
"""
_T = TypeVar("_T")


class DiskClaims:
    """
    Args:
        disk: with the table of `SCHEMA`.
        clock: seconds since the epoch.
    """

    def __init__(self, disk: Disk, *, ttl_s: float, clock: Callable[[], float] = time.time) -> None:
        self._disk = disk
        self._ttl_s = ttl_s
        self._clock = clock

    async def claim(self, key: str, claim: Claim) -> Claim:
        now_s = self._clock()

        def job(connection: sqlite3.Connection) -> bytes | None:
            connection.execute("DELETE FROM claims WHERE stored_s <= ?", (now_s - self._ttl_s,))
            row = key, now_s, encode_claim(claim)
            connection.execute("INSERT OR IGNORE INTO claims VALUES (?, ?, ?)", row)
            return _claim_of(connection, key, now_s - self._ttl_s)

        stored = await self._answered(self._disk.run(job))
        assert stored is not None
        return decode_claim(stored)

    async def find(self, key: str) -> Claim | None:
        oldest_s = self._clock() - self._ttl_s
        found = await self._answered(
            self._disk.look(lambda connection: _claim_of(connection, key, oldest_s))
        )
        return None if found is None else decode_claim(found)

    async def give_back(self, key: str) -> None:
        def delete(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM claims WHERE key = ?", (key,))

        await self._answered(self._disk.run(delete))

    async def _answered(self, work: Coroutine[Any, Any, _T]) -> _T:
        try:
            return await work
        except DiskError as error:
            raise store_unavailable(str(error)) from error


def _claim_of(connection: sqlite3.Connection, key: str, oldest_s: float) -> bytes | None:
    query = "SELECT claim FROM claims WHERE key = ? AND stored_s > ?"
    found = connection.execute(query, (key, oldest_s)).fetchone()
    return None if found is None else bytes(found[0])
