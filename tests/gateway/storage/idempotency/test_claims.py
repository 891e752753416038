"""What every store of claims does: in memory, on disk, in Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.gateway.storage.disk import Disk
from penstock.gateway.storage.idempotency import disk_claims
from penstock.gateway.storage.idempotency.claims import Claim, ClaimStore, MemoryClaims
from penstock.gateway.storage.idempotency.disk_claims import DiskClaims
from penstock.gateway.storage.idempotency.redis_claims import RedisClaims
from penstock.gateway.storage.redis.link import RedisLink
from penstock.gateway.storage.redis.url import RedisAddress

from ....redis_server import RedisServer

FIRST, SECOND = Claim("body", "resp_1", 1_700_000_000), Claim("body", "resp_2", 1_700_000_001)


@pytest.fixture(params=["memory", "disk", pytest.param("redis", marks=pytest.mark.redis)])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ClaimStore]:
    if request.param == "memory":
        yield MemoryClaims(ttl_s=100.0)
    elif request.param == "disk":
        disk = Disk(tmp_path, (disk_claims.SCHEMA,), on_emptied=lambda: None)
        disk.open()
        disk.start()
        yield DiskClaims(disk, ttl_s=100.0)
        await disk.close()
    else:
        server: RedisServer = request.getfixturevalue("redis_server")
        link = RedisLink(RedisAddress.parse(server.url))
        yield RedisClaims(link, ttl_s=100.0)
        await link.aclose()


async def test_a_key_stands_for_what_claimed_it_first(store: ClaimStore) -> None:
    assert await store.find("a") is None
    assert await store.claim("a", FIRST) == FIRST
    assert await store.claim("a", SECOND) == FIRST
    assert await store.find("a") == FIRST
    assert await store.claim("b", SECOND) == SECOND


async def test_of_many_at_once_one_claims_it(store: ClaimStore) -> None:
    claims = [Claim("body", f"resp_{number}", 0) for number in range(20)]
    stored = await asyncio.gather(*(store.claim("a", claim) for claim in claims))
    assert set(stored) == {await store.find("a")}


async def test_what_was_given_back_can_be_claimed_again(store: ClaimStore) -> None:
    await store.claim("a", FIRST)
    await store.give_back("a")
    assert await store.find("a") is None
    await store.give_back("a")
    assert await store.claim("a", SECOND) == SECOND


async def test_a_claim_ends_with_its_time(tmp_path: Path) -> None:
    now_s = 0.0
    disk = Disk(tmp_path, (disk_claims.SCHEMA,), on_emptied=lambda: None)
    disk.open()
    disk.start()
    stores: list[ClaimStore] = [
        MemoryClaims(ttl_s=10.0, clock=lambda: now_s),
        DiskClaims(disk, ttl_s=10.0, clock=lambda: now_s),
    ]
    for store in stores:
        now_s = 0.0
        await store.claim("a", FIRST)
        now_s = 9.0
        assert await store.find("a") == FIRST
        now_s = 10.0
        assert await store.find("a") is None
        assert await store.claim("a", SECOND) == SECOND
    await disk.close()
