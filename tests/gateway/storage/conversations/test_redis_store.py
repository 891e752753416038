"""What only a store in Redis can do, or suffer: several gateways, restarts, a cluster, expiry."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from array import array
from collections.abc import AsyncIterator, Awaitable
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from redis.crc import key_slot

from penstock.gateway.storage.conversations.redis_store import RedisConversationStore
from penstock.gateway.storage.conversations.store import (
    ConversationLockedError,
    StoreUnavailableError,
)
from penstock.gateway.storage.conversations.turn_codec import pack
from penstock.gateway.storage.redis.link import RedisLink
from penstock.gateway.storage.redis.url import RedisAddress

from ....redis_server import RedisServer
from ...conftest import PATIENCE_S, RedisPath, configured
from .conftest import RedisBed
from .making import TENANT, a_conversation, a_turn, finished, head_of, not_found, say

pytestmark = pytest.mark.redis


@contextlib.asynccontextmanager
async def store_at(
    url: str, timeout_s: float = PATIENCE_S
) -> AsyncIterator[RedisConversationStore]:
    link = RedisLink(RedisAddress.parse(url), timeout_s=timeout_s)
    try:
        yield RedisConversationStore(link)
    finally:
        await link.aclose()


async def test_one_gateway_of_two_wins_the_head(
    redis_bed: RedisBed, shared_server: RedisServer
) -> None:
    async with store_at(shared_server.url) as one, store_at(shared_server.url) as other:
        conversation = a_conversation()
        await one.create(conversation)
        turns = [a_turn(conversation) for _ in range(60)]
        results = await asyncio.gather(
            *(
                store.begin_turn(turn, takes_head=True)
                for turn, store in zip(turns, [one, other] * 30, strict=True)
            ),
            return_exceptions=True,
        )
        winner = turns[results.index(None)]
        assert sum(isinstance(result, ConversationLockedError) for result in results) == 59
        await other.finish_turn(finished(winner))
        assert await head_of(one, conversation) == winner.turn_id


async def test_conversations_without_a_version_go_on(
    redis_bed: RedisBed, shared_server: RedisServer
) -> None:
    """As gateways up to f64993e wrote them; such a one may also go on beside this one."""
    store, conversation = redis_bed.store(), a_conversation()
    turn = replace(finished(a_turn(conversation)), images={})
    packed = pack(turn)
    tree = conversation.conversation_id.removeprefix("conv_")
    fields = {
        "tenant": TENANT,
        "created_at": conversation.created_at,
        "is_listed": 1,
        "metadata": msgpack.packb(dict(conversation.metadata)),
        "head": turn.turn_id,
        "running": "",
        "num_turns": 1,
        "num_bytes": 2000,
    }
    key = f"penstock:{{{tree}}}:conversation"
    with shared_server.client() as client:
        client.hset(key, mapping=fields)
        client.hset(f"penstock:{{{tree}}}:turns", turn.turn_id, packed.body)
        link = f"1||completed|{turn.created_at}|0"
        client.hset(f"penstock:{{{tree}}}:links", turn.turn_id, link)
        digest = hashlib.sha256(TENANT.encode()).hexdigest()[:32]
        listed = f"penstock:{{{digest}}}:conversations"
        client.zadd(listed, {conversation.conversation_id: turn.created_at})

        assert await store.get(TENANT, conversation.conversation_id) == replace(
            conversation, head=turn.turn_id
        )
        (shown,), _ = await store.list_page(TENANT, limit=9)
        assert (shown.used_at, shown.head) == (turn.created_at, turn.turn_id)
        assert await store.path(TENANT, turn.turn_id) == [turn]
        later = await say(store, conversation, turn)
        assert await head_of(store, conversation) == later.turn_id

        client.hset(key, mapping={"running": "", "head": turn.turn_id})  # with no new version
        other = a_turn(conversation, turn)
        await store.begin_turn(other, takes_head=True)
        assert (await store.get(TENANT, conversation.conversation_id)).running == other.turn_id
        client.hdel(f"penstock:{{{tree}}}:links", later.turn_id)
        client.hdel(f"penstock:{{{tree}}}:turns", later.turn_id)
        shown_ids = [
            each.turn_id for each in await store.tree(TENANT, conversation.conversation_id)
        ]
        assert shown_ids == [turn.turn_id, other.turn_id]
        await store.delete(TENANT, conversation.conversation_id)
        assert client.keys(f"*{tree}*") == []


async def test_what_other_gateways_changed_is_seen(
    redis_bed: RedisBed, shared_server: RedisServer
) -> None:
    """Each knows a tree that the other has changed meanwhile, and no operation is lost."""
    async with store_at(shared_server.url) as one, store_at(shared_server.url) as other:
        conversation = a_conversation()
        key = (TENANT, conversation.conversation_id)
        await one.create(conversation)
        first = await say(one, conversation)
        second = await say(other, conversation, first)
        third = await say(one, conversation, second)
        await asyncio.gather(
            one.update(*key, metadata={"title": "new"}),
            other.update(*key, is_pinned=True),
            *(say(each, conversation, third, takes_head=False) for each in [one, other] * 5),
        )
        await one.delete_turn(TENANT, third.turn_id)
        shown = await other.get(*key)
        assert (shown.head, shown.is_pinned, shown.title) == (second.turn_id, True, "new")
        assert len(await other.tree(*key)) == 12
        await other.delete(*key)
        with not_found():
            await one.begin_turn(a_turn(conversation, second), takes_head=True)


async def test_an_operation_is_one_round_trip(
    redis_bed: RedisBed, shared_server: RedisServer
) -> None:
    store, conversation = redis_bed.store(), a_conversation(is_listed=False)
    turn = a_turn(conversation)
    await store.create(a_conversation(is_listed=False))  # then Redis has the script
    with shared_server.client() as client:
        client.config_resetstat()
        await store.create(conversation)
        await store.get(TENANT, conversation.conversation_id)
        await store.begin_turn(turn, takes_head=True)
        await store.finish_turn(finished(turn))
        await store.path(TENANT, turn.turn_id)
        assert client.info("commandstats")["cmdstat_evalsha"]["calls"] == 5


async def test_what_redis_was_told_twice_is_done_once(
    redis_bed: RedisBed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client repeats a command whose reply was lost."""
    store, conversation = redis_bed.store(), a_conversation()
    key, run, lost = (TENANT, conversation.conversation_id), redis_bed.link.run, []

    async def run_losing_a_reply(*args: Any) -> Any:
        if lost:
            lost.pop()
            await run(*args)
        return await run(*args)

    monkeypatch.setattr(redis_bed.link, "run", run_losing_a_reply)

    async def told_twice(operation: Awaitable[Any]) -> Any:
        lost.append(True)
        found = await operation
        assert not lost
        return found

    await told_twice(store.create(conversation))
    first = a_turn(conversation)
    await told_twice(store.begin_turn(first, takes_head=True))
    first = finished(first)
    await told_twice(store.finish_turn(first))
    added = a_turn(conversation, first, status="completed")
    await told_twice(store.add_items(added))
    changed = await told_twice(store.update(*key, metadata={"a": "b"}, is_pinned=True))
    assert (changed.metadata, changed.is_pinned) == ({"a": "b"}, True)
    await told_twice(store.replace_items(replace(first, items=())))
    assert await store.path(TENANT, added.turn_id) == [replace(first, items=()), added]
    assert len(await store.tree(*key)) == 2
    assert (await store.get(*key)).head == added.turn_id


async def test_scripts_survive_their_loss(redis_bed: RedisBed, shared_server: RedisServer) -> None:
    store, conversation = redis_bed.store(), a_conversation()
    await store.create(conversation)
    turn = a_turn(conversation)
    with shared_server.client() as client:
        client.script_flush()
        await store.begin_turn(turn, takes_head=True)
        client.script_flush()
        await store.finish_turn(finished(turn))
        client.script_flush()
    assert len((await store.list_page(TENANT, limit=3))[0]) == 1
    assert await head_of(store, conversation) == turn.turn_id


async def test_every_use_puts_off_the_end_of_every_key(
    redis_bed: RedisBed, shared_server: RedisServer
) -> None:
    store, conversation = redis_bed.store(ttl_s=1000), a_conversation()
    await store.create(conversation)
    turn = await say(store, conversation)
    with shared_server.client() as client:
        keys = client.keys()
        assert len(keys) == 4  # one of them the tenant's index
        assert all(0 < client.pttl(key) <= 2_000_000 for key in keys)
        own = [key for key in keys if b":conversations" not in key]
        assert len({key_slot(key) for key in own}) == 1
        uses = (
            lambda: store.get(TENANT, conversation.conversation_id),
            lambda: store.path(TENANT, turn.turn_id),
            lambda: store.turn(TENANT, turn.turn_id),
            lambda: store.begin_turn(a_turn(conversation, turn), takes_head=False),
        )
        for use in uses:
            for key in own:
                client.pexpire(key, 60_000)
            await use()
            assert all(client.pttl(key) > 500_000 for key in own)
        for key in own:
            client.pexpire(key, 60_000)
        await store.list_page(TENANT, limit=10)  # being listed is not being used
        assert all(client.pttl(key) <= 60_000 for key in own)


async def test_a_listing_cleans_its_index(redis_bed: RedisBed, shared_server: RedisServer) -> None:
    store = redis_bed.store()
    made = [a_conversation(created_at=index) for index in range(30)]
    for conversation in made:
        await store.create(conversation)
    with shared_server.client() as client:
        for conversation in made[4:28]:  # as if they had expired
            tree = conversation.conversation_id.removeprefix("conv_")
            client.delete(*client.keys(f"*{tree}*"))
        page, has_more = await store.list_page(TENANT, limit=5)
        assert page == [made[index] for index in (29, 28, 3, 2, 1)]
        assert has_more
        (index,) = client.keys("*:conversations")
        assert client.zcard(index) == 6


async def test_it_says_at_once_that_redis_is_gone_and_recovers_alone(
    redis_server: RedisServer,
) -> None:
    async with RedisPath(redis_server) as path, store_at(path.url) as store:
        conversation = a_conversation()
        await store.create(conversation)
        turn = await say(store, conversation)
        await path.lose()
        for _ in range(3):
            async with asyncio.timeout(PATIENCE_S / 2):  # it does not wait for an answer
                with pytest.raises(StoreUnavailableError) as caught:
                    await store.path(TENANT, turn.turn_id)
            assert caught.value.status == 503
            assert caught.value.code == "session_store_unavailable"
        path.find()
        assert await store.path(TENANT, turn.turn_id) == [turn]
        await say(store, conversation, turn)


async def test_a_redis_that_hangs_is_given_up(redis_server: RedisServer) -> None:
    async with (
        RedisPath(redis_server) as path,
        store_at(redis_server.url) as patient,
        store_at(path.url, timeout_s=0.2) as store,
    ):
        conversation, found = a_conversation(), None
        await patient.create(conversation)
        with path.silent():
            async with asyncio.timeout(PATIENCE_S):
                with pytest.raises(StoreUnavailableError):
                    await store.get(TENANT, conversation.conversation_id)
        async with asyncio.timeout(PATIENCE_S):
            while found is None:
                with contextlib.suppress(StoreUnavailableError):  # as long as it is slow
                    found = await store.get(TENANT, conversation.conversation_id)
        assert found == conversation


async def test_a_full_redis_still_reads(redis_server: RedisServer) -> None:
    async with store_at(redis_server.url) as store:
        conversation = a_conversation()
        await store.create(conversation)
        turn = await say(store, conversation)
        with configured(redis_server, maxmemory=1):
            with pytest.raises(StoreUnavailableError):
                await store.begin_turn(a_turn(conversation, turn), takes_head=True)
            assert await store.path(TENANT, turn.turn_id) == [turn]
            shown = await store.get(TENANT, conversation.conversation_id)
            assert (shown.head, shown.running) == (turn.turn_id, None)


async def test_turns_share_token_ids_and_take_theirs_along(
    redis_bed: RedisBed, shared_server: RedisServer
) -> None:
    store, conversation = redis_bed.store(), a_conversation()
    await store.create(conversation)
    shared, more = array("I", range(5120)), array("I", range(9000, 11048))
    turns = []
    for token_ids in (shared, shared + more):
        turns.append(a_turn(conversation, prompt_token_ids=token_ids))
        await store.begin_turn(turns[-1], takes_head=False)
    with shared_server.client() as client:
        (key,) = client.keys("*:token_ids")
        assert client.hlen(key) == 14  # 10 and 4
        await store.delete_turn(TENANT, turns[1].turn_id)
        assert client.hlen(key) == 10
        assert await store.turn(TENANT, turns[0].turn_id) == turns[0]
        await store.delete_turn(TENANT, turns[0].turn_id)
        assert client.keys("*:token_ids") == []


async def test_a_redis_that_dropped_a_key_has_lost_the_turn(
    redis_bed: RedisBed, shared_server: RedisServer
) -> None:
    store, conversation = redis_bed.store(), a_conversation()
    await store.create(conversation)
    turn = await say(store, conversation)
    with shared_server.client() as client:
        client.delete(*client.keys("*:turns"))
    with not_found():
        await store.path(TENANT, turn.turn_id)


async def test_on_a_cluster(cluster_node: RedisServer) -> None:
    url = cluster_node.url.replace("redis://", "redis+cluster://").removesuffix("/0")
    async with store_at(url) as store:
        for _ in range(5):
            conversation = a_conversation()
            await store.create(conversation)
            turn = await say(store, conversation)
            turn = await say(store, conversation, turn)
        assert await head_of(store, conversation) == turn.turn_id
        assert len(await store.path(TENANT, turn.turn_id)) == 2
        assert len((await store.list_page(TENANT, limit=9))[0]) == 5
        await store.delete(TENANT, conversation.conversation_id)
        with cluster_node.client() as client:
            client.script_flush()
            # 4 conversations of 3 keys, and the index
            assert client.dbsize() == 13
        assert len((await store.list_page(TENANT, limit=9))[0]) == 4
