"""All conversation stores, behind one way to make them and to let time pass."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from pathlib import Path
from typing import Protocol

import pytest

from penstock.gateway.storage.conversations import disk_rows
from penstock.gateway.storage.conversations.disk_store import DiskConversationStore
from penstock.gateway.storage.conversations.memory_store import MemoryConversationStore
from penstock.gateway.storage.conversations.redis_store import RedisConversationStore
from penstock.gateway.storage.conversations.store import ConversationStore
from penstock.gateway.storage.disk import Disk
from penstock.gateway.storage.redis.link import RedisLink
from penstock.gateway.storage.redis.url import RedisAddress

from ....redis_server import RedisServer
from ...conftest import PATIENCE_S


class Bed(Protocol):
    """Makes stores that share what they keep, where the kind can.

    Attributes:
        running: ids of the responses that run.
    """

    running: set[str]

    def store(self, *, ttl_s: float = 1000.0, starts_s: float = 1000.0) -> ConversationStore: ...

    async def let_pass(self, seconds: float) -> None: ...


class MemoryBed:
    def __init__(self) -> None:
        self.running = set[str]()
        self._now_s = 0.0

    def store(self, *, ttl_s: float = 1000.0, starts_s: float = 1000.0) -> ConversationStore:
        return MemoryConversationStore(
            1 << 30,
            ttl_s=ttl_s,
            running=self.running,
            starts_s=starts_s,
            clock=lambda: self._now_s,
        )

    async def let_pass(self, seconds: float) -> None:
        self._now_s += seconds


class DiskBed:
    migrations = (disk_rows.SCHEMA,)

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.running = set[str]()
        self.stores: list[DiskConversationStore] = []
        self._now_s = 0.0

    def store(
        self,
        *,
        ttl_s: float = 0.0,
        starts_s: float = 1000.0,
        max_bytes: int = 1 << 30,
    ) -> DiskConversationStore:
        store = DiskConversationStore(
            self.disk,
            max_bytes,
            running=self.running,
            starts_s=starts_s,
            clock=lambda: self._now_s,
        )
        self.stores.append(store)
        return store

    async def let_pass(self, seconds: float) -> None:
        self._now_s += seconds


class RedisBed:
    def __init__(self, link: RedisLink) -> None:
        self.link = link
        self.running = set[str]()

    def store(self, *, ttl_s: float = 1000.0, starts_s: float = 1000.0) -> RedisConversationStore:
        async def running(_: Collection[str]) -> Collection[str]:
            return self.running

        return RedisConversationStore(self.link, ttl_s=ttl_s, running=running, starts_s=starts_s)

    async def let_pass(self, seconds: float) -> None:
        """Keys, and the leases at the end of links, end so much earlier; trees have new versions,
        so that no store goes by the leases that it knows."""
        client, passed_ms = self.link.client, round(seconds * 1000)
        for key in await client.keys():
            await client.pexpire(key, await client.pttl(key) - passed_ms)
            if key.endswith(b":conversation"):
                await client.hincrby(key, "version", 1)
            links = await client.hgetall(key) if key.endswith(b":links") else {}
            for turn, link in links.items():
                rest, _, lease_ms = link.rpartition(b"|")
                await client.hset(key, turn, b"%b|%d" % (rest, max(0, int(lease_ms) - passed_ms)))


@pytest.fixture
async def redis_bed(redis_server: RedisServer) -> AsyncIterator[RedisBed]:
    link = RedisLink(RedisAddress.parse(redis_server.url), timeout_s=PATIENCE_S)
    yield RedisBed(link)
    await link.aclose()


@pytest.fixture
async def disk_bed(tmp_path: Path) -> AsyncIterator[DiskBed]:
    disk = Disk(tmp_path, DiskBed.migrations)
    disk.open()
    disk.start()
    bed = DiskBed(disk)
    yield bed
    for store in bed.stores:
        await store.close()
    await bed.disk.close()


@pytest.fixture(params=["memory", "disk", pytest.param("redis", marks=pytest.mark.redis)])
def bed(request: pytest.FixtureRequest) -> Bed:
    kind = request.param
    found: Bed = MemoryBed() if kind == "memory" else request.getfixturevalue(f"{kind}_bed")
    return found


@pytest.fixture
def store(bed: Bed) -> ConversationStore:
    return bed.store()
