"""Engines that register in Redis: leases, joins and leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from penstock.gateway.storage.conversations.store import StoreUnavailableError, UnreadableDataError
from penstock.gateway.storage.redis.engines import (
    MAX_FULL_READ_S,
    MIN_FULL_READ_S,
    EngineRecord,
    RedisEngines,
    full_read_s,
)
from penstock.gateway.storage.redis.link import RedisLink
from penstock.gateway.storage.redis.url import RedisAddress
from tests.redis_server import RedisServer

from ..conftest import PATIENCE_S, RedisPath

pytestmark = pytest.mark.redis
_RECORD = EngineRecord(address="10.0.0.1:7000", model="m", cache_root=b"r", block_size=16)
_OTHER = msgspec.structs.replace(_RECORD, address="10.0.0.2:7000", adapters=("a",))


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def engines(redis_server: RedisServer, clock: Clock) -> AsyncIterator[RedisEngines]:
    link = RedisLink(RedisAddress.parse(redis_server.url), timeout_s=PATIENCE_S)
    found = RedisEngines(link, "m", clock=clock)
    yield found
    await found.close()


async def test_who_joins_and_leaves_is_seen_at_once(engines: RedisEngines) -> None:
    assert set(await engines.addresses()) == set()
    await engines.register(_RECORD)
    assert set(await engines.addresses()) == {_RECORD.address}
    await engines.register(_OTHER)
    assert await engines.records() == [_RECORD, _OTHER]
    await engines.withdraw(_RECORD.address)
    assert set(await engines.addresses()) == {_OTHER.address}


async def test_another_models_engines_are_not_found(
    engines: RedisEngines, redis_server: RedisServer
) -> None:
    await engines.register(_RECORD)
    other = RedisEngines(RedisLink(RedisAddress.parse(redis_server.url)), "n")
    assert set(await other.addresses()) == set()
    await other.close()


async def test_a_lease_ends(engines: RedisEngines, redis_server: RedisServer, clock: Clock) -> None:
    await engines.register(_RECORD)
    await engines.register(_OTHER)
    assert len(await engines.addresses()) == 2
    with redis_server.client() as client:
        (key,) = client.keys(f"*:{_RECORD.address}")
        assert 0 < client.pttl(key) <= 3000
        client.delete(key)  # as if its time were over
    assert len(await engines.addresses()) == 2  # nobody has said so
    clock.now_s += 1.25 * MIN_FULL_READ_S
    assert set(await engines.addresses()) == {_OTHER.address}
    await engines.register(_RECORD)  # it was only slow
    assert len(await engines.addresses()) == 2


async def test_only_changes_are_read(engines: RedisEngines, redis_server: RedisServer) -> None:
    """Joins, leaves, and leases whose end another gateway noticed."""
    now = Clock()
    other = RedisEngines(RedisLink(RedisAddress.parse(redis_server.url)), "m", clock=now)
    await engines.register(_RECORD)
    for each in (engines, other):
        assert set(await each.addresses()) == {_RECORD.address}
    with redis_server.client() as client:
        client.config_resetstat()
        await engines.register(_OTHER)
        await engines.register(_OTHER)  # a lease that is renewed is no change
        assert len(await engines.addresses()) == 2
        await engines.withdraw(_OTHER.address)
        await engines.register(_OTHER)
        assert len(await engines.addresses()) == 2
        stats = client.info("commandstats")
        assert "cmdstat_mget" not in stats
        assert "cmdstat_smembers" not in stats
        (key,) = client.keys(f"*:{_RECORD.address}")
        client.delete(key)
        now.now_s += 1.25 * MIN_FULL_READ_S
        assert set(await other.addresses()) == {_OTHER.address}  # it reads all, and says so
        assert set(await engines.addresses()) == {_OTHER.address}
        assert client.info("commandstats")["cmdstat_mget"]["calls"] == 1
    await other.close()


@pytest.mark.parametrize("lost", ["one change", "all changes", "everything", "by an older engine"])
async def test_lost_changes_are_made_up_for(
    engines: RedisEngines, redis_server: RedisServer, lost: str
) -> None:
    await engines.register(_RECORD)
    assert set(await engines.addresses()) == {_RECORD.address}
    with redis_server.client() as client:
        (changes,) = client.keys("*:changes")
        if lost == "by an older engine":  # it wrote no changes
            await engines.register(_OTHER)
            client.zremrangebyrank(changes, -1, -1)
        elif lost == "everything":
            client.flushall()
            await asyncio.sleep(0.01)  # numbers begin with the time in ms
            await engines.register(_OTHER)
        else:
            await engines.withdraw(_RECORD.address)
            await engines.register(_RECORD)
            await engines.register(_OTHER)
            client.zremrangebyrank(changes, 1, 1 if lost == "one change" else -1)
    expected = {_OTHER.address} if lost == "everything" else {_RECORD.address, _OTHER.address}
    assert set(await engines.addresses()) == expected


def test_large_pools_are_read_whole_more_seldom() -> None:
    assert full_read_s(3) == MIN_FULL_READ_S
    assert MIN_FULL_READ_S < full_read_s(500) < MAX_FULL_READ_S
    assert full_read_s(10_000) == MAX_FULL_READ_S


async def test_foreign_content(engines: RedisEngines, redis_server: RedisServer) -> None:
    await engines.register(_RECORD)
    with redis_server.client() as client:
        (key,) = client.keys(f"*:{_RECORD.address}")
        client.set(key, msgspec.msgpack.encode(_OTHER))  # a record that names another address
        assert await engines.records() == []
        client.set(key, b"\xc1")
    with pytest.raises(UnreadableDataError):
        await engines.records()


async def test_a_redis_that_is_away(redis_server: RedisServer) -> None:
    async with RedisPath(redis_server) as path:
        engines = RedisEngines(RedisLink(RedisAddress.parse(path.url), timeout_s=PATIENCE_S), "m")
        await engines.register(_RECORD)
        await path.lose()
        with pytest.raises(StoreUnavailableError):
            await engines.register(_OTHER)
        await engines.close()
