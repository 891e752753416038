"""Who loses what in a real Redis, whichever gateway stores it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from penstock.gateway.errors import RequestRefusedError
from penstock.gateway.storage.conversations.records import Conversation
from penstock.gateway.storage.conversations.redis_store import RedisConversationStore
from penstock.gateway.storage.conversations.store import StoreUnavailableError
from penstock.gateway.storage.redis.link import RedisLink
from penstock.gateway.storage.redis.shares import RedisShares
from penstock.gateway.storage.redis.url import RedisAddress
from penstock.gateway.storage.response_log.redis_store import RedisLogStore
from penstock.gateway.storage.tenant_shares import NO_QUOTA, QuotaOf, StoreLimitError, StoreQuota

from ...redis_server import RedisServer
from ..conftest import PATIENCE_S, RedisPath, configured
from .conversations.making import a_conversation, a_turn, finished
from .response_log.conftest import PATIENT
from .response_log.records import add_delta, add_end, header, read_to_end

pytestmark = pytest.mark.redis


@dataclass
class Gateway:
    link: RedisLink
    shares: RedisShares
    conversations: RedisConversationStore
    logs: RedisLogStore

    async def store(self, tenant: str, num_bytes: int = 10_000) -> Conversation:
        conversation = a_conversation(tenant=tenant, metadata={})
        await self.conversations.create(conversation)
        content = [{"text": "x" * num_bytes}]
        items = ({"id": "msg_1", "role": "user", "content": content},)
        await self.conversations.add_items(a_turn(conversation, items=items))
        return conversation

    async def log(self, tenant: str, num_chars: int = 10_000) -> str:
        log = await self.logs.create(header(tenant))
        add_delta(log, "x" * num_chars)
        add_end(log)
        await read_to_end(log)
        await self.told()
        return log.header.response_id

    async def told(self) -> None:
        """Wait until the account knows what was told."""
        await self.shares.tell("nobody", "none", 0, ttl_s=0)

    async def is_there(self, tenant: str, stored: Conversation | str) -> bool:
        try:
            if isinstance(stored, str):
                await self.logs.find(tenant, stored)
            else:
                await self.conversations.get(tenant, stored.conversation_id)
        except RequestRefusedError as error:
            if error.code not in ("conversation_not_found", "response_expired"):
                raise
            return False
        return True

    async def fill(self, tenant: str, num_bytes: int, into: list[Conversation]) -> None:
        while True:
            into.append(await self.store(tenant, num_bytes))


@contextlib.asynccontextmanager
async def gateway(url: str, quota_of: QuotaOf = lambda _: NO_QUOTA) -> AsyncIterator[Gateway]:
    address = RedisAddress.parse(url)
    link, log_link = (RedisLink(address, timeout_s=PATIENCE_S) for _ in range(2))
    shares = RedisShares(link, quota_of)
    logs = RedisLogStore(log_link.client, PATIENT, shares=shares)
    try:
        yield Gateway(link, shares, RedisConversationStore(link, shares=shares), logs)
    finally:
        await logs.close()
        await shares.aclose()
        await log_link.aclose()
        await link.aclose()


@pytest.fixture(params=["server", "cluster"])
def url(request: pytest.FixtureRequest) -> str:
    if request.param == "server":
        server: RedisServer = request.getfixturevalue("redis_server")
        return server.url
    node: RedisServer = request.getfixturevalue("cluster_node")
    return node.url.replace("redis://", "redis+cluster://").removesuffix("/0")


@pytest.mark.parametrize(
    "quota", [StoreQuota(num_bytes=50_000), StoreQuota(num_objects=4)], ids=["bytes", "objects"]
)
async def test_a_tenant_beyond_its_quota_loses_its_own_oldest_of_any_kind(
    url: str, quota: StoreQuota
) -> None:
    def quota_of(tenant: str) -> StoreQuota:
        return quota if tenant == "a" else NO_QUOTA

    async with gateway(url, quota_of) as here, gateway(url, quota_of) as there:
        others = await here.store("b"), await here.log("b")
        first, second = await here.store("a"), await there.log("a")
        await there.conversations.get("a", first.conversation_id)  # used again
        await there.told()
        made = [await here.log("a"), await there.store("a"), await here.log("a")]
        assert not await here.is_there("a", second)
        assert await here.is_there("a", first)
        await here.told()
        made[1:1] = [await here.store("a")]
        assert [await here.is_there("a", one) for one in made] == [False, True, True, True]
        assert all([await here.is_there("b", one) for one in others])


async def test_gateways_that_store_at_once_keep_the_quota_together(
    redis_server: RedisServer,
) -> None:
    def quota_of(_: str) -> StoreQuota:
        return StoreQuota(num_objects=5)

    async with (
        gateway(redis_server.url, quota_of) as here,
        gateway(redis_server.url, quota_of) as there,
    ):
        tenants = [(one, tenant) for one in (here, there) for tenant in "ab" * 10]
        await asyncio.gather(
            *(one.conversations.create(a_conversation(tenant=tenant)) for one, tenant in tenants)
        )
        await asyncio.gather(here.told(), there.told())
        for tenant in "ab":
            page, _ = await here.conversations.list_page(tenant, limit=100)
            assert len(page) == 5


async def test_a_flood_of_one_tenant_takes_nothing_from_another(redis_server: RedisServer) -> None:
    with redis_server.client() as client:
        used = int(client.info("memory")["used_memory"])
    with configured(redis_server, maxmemory=used + 40_000_000):
        async with gateway(redis_server.url) as here:
            kept = [await here.store("small"), await here.log("small")]
            flood = [await here.store("flood", 3_800_000) for _ in range(20)]
            kept.append(await here.store("small"))
            assert all([await here.is_there("small", one) for one in kept])
            there = [await here.is_there("flood", one) for one in flood]
            assert there == sorted(there), "its own oldest went"
            assert 3 < sum(there) < 12


async def test_who_filled_redis_alone_makes_room_for_the_next(redis_server: RedisServer) -> None:
    with redis_server.client() as client:
        used = int(client.info("memory")["used_memory"])
    with configured(redis_server, maxmemory=used + 40_000_000):
        async with gateway(redis_server.url) as here:
            flood: list[Conversation] = []
            with pytest.raises(StoreUnavailableError, match="out of memory"):
                await here.fill("flood", 3_800_000, flood)
            kept = [await here.store("small", 3_000_000) for _ in range(4)]
            assert all([await here.is_there("small", one) for one in kept])
            there = [await here.is_there("flood", one) for one in flood]
            assert there == sorted(there), "its own oldest went"
            assert 0 < sum(there) < len(flood)


async def test_a_running_turn_keeps_its_conversation(redis_server: RedisServer) -> None:
    async with gateway(redis_server.url, lambda _: StoreQuota(num_bytes=30_000)) as here:
        running = await here.store("a")
        turn = a_turn(running)
        await here.conversations.begin_turn(turn, takes_head=False)
        made = [await here.store("a") for _ in range(4)]
        assert await here.is_there("a", running)
        assert [await here.is_there("a", one) for one in made] == [False] * 3 + [True]
        await here.conversations.finish_turn(finished(turn))
        for _ in range(2):
            await here.store("a")
        assert not await here.is_there("a", running)


async def test_a_conversation_that_could_never_be_kept_is_refused(
    redis_server: RedisServer,
) -> None:
    async with gateway(redis_server.url, lambda _: StoreQuota(num_bytes=20_000)) as here:
        made = await here.store("a")
        content = [{"text": "x" * 20_000}]
        turn = a_turn(made, items=({"id": "msg_1", "role": "user", "content": content},))
        with pytest.raises(StoreLimitError, match="20000 bytes"):
            await here.conversations.add_items(turn)
        assert await here.is_there("a", made)


async def test_what_a_gateway_died_over_another_deletes(redis_server: RedisServer) -> None:
    async with gateway(redis_server.url, lambda _: StoreQuota(num_objects=1)) as here:
        first = await here.store("a")

        async def dies(_: str, __: str) -> bool:
            raise RuntimeError("it died")

        async with gateway(redis_server.url, lambda _: StoreQuota(num_objects=1)) as dying:
            dying.shares.add_kind("conv_", dies)
            with pytest.raises(RuntimeError, match="it died"):
                await dying.store("a")
        assert await here.is_there("a", first)
        await here.store("a")
        assert not await here.is_there("a", first)


async def test_nothing_is_counted_of_what_is_gone(url: str) -> None:
    async with gateway(url) as here:
        deleted, expired = await here.store("a"), await here.store("a")
        log = await here.log("a")
        turn = a_turn(deleted)
        await here.conversations.begin_turn(turn, takes_head=False)
        await here.conversations.finish_turn(finished(turn))
        await here.conversations.delete_turn("a", turn.turn_id)
        await here.conversations.delete("a", deleted.conversation_id)
        await here.logs.delete("a", log)
        await here.shares.tell("a", expired.conversation_id, 1, ttl_s=0.001)
        await asyncio.sleep(0.01)
        await here.told()
        assert not await here.link.client.exists("penstock:{stored}:objects")


async def test_a_conversation_counts_what_is_in_it(redis_server: RedisServer) -> None:
    """Also one that was stored before anything was counted."""
    async with gateway(redis_server.url) as here:
        conversation = await here.store("a", 5000)
        turn = a_turn(conversation)
        for _ in range(2):  # the second changes nothing
            await here.conversations.begin_turn(turn, takes_head=False)
        await here.conversations.finish_turn(finished(turn))
        with redis_server.client() as client:
            (key,) = client.keys("penstock:*:conversation")
            num_bytes = int(client.hget(key, "num_bytes"))
            client.hdel(key, "num_bytes")
            await here.conversations.update("a", conversation.conversation_id, metadata={"a": "b"})
            assert int(client.hget(key, "num_bytes")) == num_bytes + 4  # as msgpack
            await here.conversations.delete_turn("a", turn.turn_id)
            assert int(client.hget(key, "num_bytes")) < num_bytes


async def test_an_account_that_is_away_is_told_later(redis_server: RedisServer) -> None:
    """What is stored meanwhile is stored, and counts."""
    async with RedisPath(redis_server) as path, gateway(redis_server.url) as there:
        link = RedisLink(RedisAddress.parse(path.url), timeout_s=PATIENCE_S)
        now_s = 0.0
        shares = RedisShares(link, lambda _: StoreQuota(num_objects=1), clock=lambda: now_s)
        here = Gateway(
            there.link, shares, RedisConversationStore(there.link, shares=shares), there.logs
        )
        await path.lose()
        made = []
        for _ in range(3):
            made.append(await here.store("a"))
            now_s += 1.0  # the least recently used goes first
        assert all([await there.is_there("a", one) for one in made])
        path.find()
        now_s += 10.0
        await here.told()
        left = [await there.is_there("a", one) for one in made]
        await shares.aclose()
        await link.aclose()
        assert left == [False, False, True]
