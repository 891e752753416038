"""Who loses what, in the stores of one process."""

from __future__ import annotations

import dataclasses

import pytest

from penstock.gateway.storage.conversations.memory_store import MemoryConversationStore
from penstock.gateway.storage.conversations.records import Conversation
from penstock.gateway.storage.response_log.log_store import MemoryLogStore
from penstock.gateway.storage.tenant_shares import (
    NO_QUOTA,
    StoreLimitError,
    StoreQuota,
    TenantShares,
)

from .conversations.making import a_conversation, a_turn, not_found
from .response_log.records import add_delta, add_end, expired, header


async def store(
    conversations: MemoryConversationStore, tenant: str, num_bytes: int = 10_000
) -> Conversation:
    conversation = a_conversation(tenant=tenant, metadata={})
    await conversations.create(conversation)
    content = [{"text": "x" * num_bytes}]
    items = ({"id": "msg_1", "role": "user", "content": content},)
    await conversations.add_items(a_turn(conversation, items=items))
    return conversation


async def is_there(conversations: MemoryConversationStore, conversation: Conversation) -> bool:
    page, _ = await conversations.list_page(conversation.tenant, limit=1000)
    return conversation.conversation_id in {one.conversation_id for one in page}


async def log(logs: MemoryLogStore, tenant: str, num_chars: int = 10_000) -> str:
    made = await logs.create(dataclasses.replace(header(), tenant=tenant))
    add_delta(made, "x" * num_chars)
    add_end(made)
    return made.header.response_id


async def test_a_flood_takes_nothing_from_a_tenant_within_its_share() -> None:
    conversations = MemoryConversationStore(200_000)
    kept = [await store(conversations, "small") for _ in range(5)]
    flood = [await store(conversations, "flood", 40_000) for _ in range(50)]
    assert conversations.num_bytes <= 200_000
    assert all([await is_there(conversations, one) for one in kept])
    there = [await is_there(conversations, one) for one in flood]
    assert there == sorted(there), "its own oldest went"
    assert sum(there) == 3


async def test_the_furthest_over_an_equal_share_loses_its_oldest() -> None:
    conversations = MemoryConversationStore(100_000)
    of = {
        tenant: [await store(conversations, tenant) for _ in range(num)]
        for tenant, num in {"a": 2, "b": 4}.items()
    }
    await store(conversations, "c", 30_000)  # beyond the bound, and itself within a third
    there = {
        tenant: [await is_there(conversations, one) for one in made] for tenant, made in of.items()
    }
    assert there == {"a": [True, True], "b": [False, True, True, True]}


async def test_what_runs_stays_at_nobody_elses_cost() -> None:
    conversations = MemoryConversationStore(60_000)
    kept = await store(conversations, "small")
    running = []
    for _ in range(8):
        conversation = a_conversation(tenant="flood", is_listed=False)
        await conversations.create(conversation)
        content = [{"text": "x" * 10_000}]
        turn = a_turn(conversation, items=({"role": "user", "content": content},))
        await conversations.begin_turn(turn, takes_head=True)
        running.append(conversation)
    assert conversations.num_bytes > 60_000
    assert await is_there(conversations, kept)
    for one in running:
        assert await conversations.get("flood", one.conversation_id)


@pytest.mark.parametrize(
    "quota", [StoreQuota(num_bytes=50_000), StoreQuota(num_objects=4)], ids=["bytes", "objects"]
)
async def test_a_tenant_beyond_its_quota_loses_its_own_oldest_of_any_kind(
    quota: StoreQuota,
) -> None:
    shares = TenantShares(lambda tenant: quota if tenant == "a" else NO_QUOTA)
    conversations = MemoryConversationStore(1 << 30, shares=shares)
    logs = MemoryLogStore(1 << 30, shares=shares)
    other = await store(conversations, "b"), await log(logs, "b")
    first, second = await store(conversations, "a"), await log(logs, "a")
    await conversations.get("a", first.conversation_id)  # used again
    made = [await log(logs, "a"), await store(conversations, "a"), await log(logs, "a")]
    with expired():
        await logs.find("a", second)
    assert await is_there(conversations, first)
    await store(conversations, "a")
    assert not await is_there(conversations, first)
    for response_id in (made[0], made[2]):
        await logs.find("a", str(response_id))
    assert await is_there(conversations, other[0])
    await logs.find("b", other[1])


async def test_a_conversation_that_could_never_be_kept_is_refused() -> None:
    shares = TenantShares(lambda _: StoreQuota(num_bytes=20_000))
    conversations = MemoryConversationStore(1 << 30, shares=shares)
    made = await store(conversations, "a")
    content = [{"text": "x" * 20_000}]
    turn = a_turn(made, items=({"id": "msg_1", "role": "user", "content": content},))
    with pytest.raises(StoreLimitError, match="20000 bytes"):
        await conversations.add_items(turn)
    with not_found():
        await conversations.turn("a", turn.turn_id)
    assert await is_there(conversations, made)
