"""What every ledger does: in memory, on disk, in Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
import pytest

from penstock.gateway.storage.conversations.store import StoreUnavailableError, store_unavailable
from penstock.gateway.storage.disk import Disk
from penstock.gateway.storage.redis.link import RedisLink
from penstock.gateway.storage.redis.url import RedisAddress
from penstock.gateway.storage.usage import disk_usage, ledger
from penstock.gateway.storage.usage.disk_usage import DiskUsage
from penstock.gateway.storage.usage.ledger import (
    Counts,
    KeyUsage,
    Ledger,
    MemoryLedger,
    StoredLedger,
    UsageRecord,
    begin_of,
    day_named,
    day_of,
    name_of,
    settled,
)
from penstock.gateway.storage.usage.redis_usage import RedisUsage

from ....redis_server import RedisServer

DAY = 20_000
ONE = Counts(1, 100, 60, 20, 7, 3, 1_234_567, 9_876_543_210)


@pytest.fixture(params=["memory", "disk", pytest.param("redis", marks=pytest.mark.redis)])
async def book(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Ledger]:
    if request.param == "memory":
        yield MemoryLedger(num_days=30)
    elif request.param == "disk":
        disk = Disk(tmp_path, (disk_usage.SCHEMA,))
        disk.open()
        disk.start()
        yield StoredLedger(DiskUsage(disk, num_days=30, clock=lambda: DAY * 86400.0))
        await disk.close()
    else:
        server: RedisServer = request.getfixturevalue("redis_server")
        link = RedisLink(RedisAddress.parse(server.url))
        yield StoredLedger(RedisUsage(link, num_days=30))
        await link.aclose()


def record(name: str, **fields: object) -> UsageRecord:
    known = UsageRecord(id=name, tenant="acme", key_id="key-1", day=DAY, counts=ONE)
    return msgspec.structs.replace(known, **fields)


async def test_sums_are_by_day_tenant_and_key(book: Ledger) -> None:
    await settled(book.note(record("a")))
    book.note(record("b", key_id="key-2"))
    await asyncio.gather(
        settled(book.note(record("c"))),
        settled(book.note(record("d", day=DAY + 1))),
        settled(book.note(record("e", tenant="other"))),
    )
    acme = [
        KeyUsage(DAY, "acme", "key-1", ONE.plus(ONE)),
        KeyUsage(DAY, "acme", "key-2", ONE),
        KeyUsage(DAY + 1, "acme", "key-1", ONE),
    ]
    assert await book.days(DAY, DAY + 1, tenant="acme") == acme
    assert await book.days(DAY + 1, DAY + 9, tenant="acme") == acme[2:]
    other = KeyUsage(DAY, "other", "key-1", ONE)
    assert await book.days(DAY, DAY, tenant=None) == [*acme[:2], other]
    assert await book.days(DAY, DAY, tenant="nobody") == []


@pytest.mark.parametrize(
    "book", ["disk", pytest.param("redis", marks=pytest.mark.redis)], indirect=True
)
async def test_a_response_counts_once_as_its_newest_epoch_says(book: Ledger) -> None:
    first, taken_over = ONE, Counts(1, 100, 0, 0, 9, 3, 5, 0)
    await settled(book.note(record("resp", counts=first, may_move=True)))
    assert await book.days(DAY, DAY, tenant="acme") == [KeyUsage(DAY, "acme", "key-1", first)]
    await settled(book.note(record("resp", counts=taken_over, may_move=True, epoch=2, day=DAY + 1)))
    await settled(book.note(record("resp", counts=first, may_move=True)))  # by one that stood still
    sums = {each.day: each.counts for each in await book.days(DAY, DAY + 1, tenant="acme")}
    assert sums.pop(DAY + 1) == taken_over
    assert not any(counts != Counts() for counts in sums.values())


async def test_days_that_are_too_old_are_dropped(tmp_path: Path) -> None:
    now_s = DAY * 86400.0
    disk = Disk(tmp_path, (disk_usage.SCHEMA,))
    disk.open()
    disk.start()
    books: list[Ledger] = [
        MemoryLedger(num_days=30),
        StoredLedger(DiskUsage(disk, num_days=30, clock=lambda: now_s)),
    ]
    for book in books:
        for day in (DAY - 30, DAY - 29, DAY):
            now_s = day * 86400.0
            await settled(book.note(record(f"of {day}", day=day)))
        found = await book.days(0, DAY, tenant=None)
        assert [each.day for each in found] == [DAY - 29, DAY]
    await disk.close()


class _Away:
    """A store that is away for a while, and then cannot say whether it has stored."""

    def __init__(self, num_failures: int) -> None:
        self.num_failures = num_failures
        self.records: list[UsageRecord] = []

    async def put(self, records: Sequence[UsageRecord]) -> None:
        if self.num_failures:
            self.num_failures -= 1
            raise store_unavailable("away")
        self.records += records

    async def days(self, first: int, last: int, *, tenant: str | None) -> list[KeyUsage]:
        raise store_unavailable("away")


async def test_what_a_store_that_is_away_did_not_take_is_stored_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ledger, "_RETRY_S", 0.0)
    monkeypatch.setattr(ledger, "_PATIENCE_S", 0.0)
    store = _Away(3)
    book = StoredLedger(store)
    names = [f"r{number}" for number in range(5)]
    for name in names:
        await settled(book.note(record(name)))
    with pytest.raises(StoreUnavailableError):
        await book.days(DAY, DAY, tenant=None)
    await book.close()
    assert [each.id for each in store.records] == names
    assert book.num_lost == 0


async def test_of_too_many_that_wait_the_oldest_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "_RETRY_S", 0.0)
    monkeypatch.setattr(ledger, "_MAX_WAITING", 3)
    store = _Away(1)
    book = StoredLedger(store)
    for number in range(5):
        book.note(record(f"r{number}"))
    await book.close()
    assert [each.id for each in store.records] == ["r2", "r3", "r4"]
    assert book.num_lost == 2


def test_days_have_names() -> None:
    assert name_of(DAY) == "2024-10-04"
    assert day_named("2024-10-04") == DAY
    assert day_of(begin_of(DAY)) == DAY
    assert day_of(begin_of(DAY) - 1) == DAY - 1
    for bad in ("20241004", "2024-10-4", "2024-02-30", "today", "2024-W40-5"):
        with pytest.raises(ValueError, match=r".+"):
            day_named(bad)
