"""What bounds the store in memory."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from penstock.gateway.storage.conversations.memory_store import MemoryConversationStore
from penstock.gateway.storage.conversations.records import Conversation, StoredTurn
from tests.support.tiers import tiered

from ...garbage import bytes_taken
from .making import TENANT, a_conversation, a_turn, finished, not_found, say


def long_turn(conversation: Conversation) -> StoredTurn:
    return replace(a_turn(conversation), prompt_token_ids=array("I", range(2500)))  # 10 kB


async def long_conversation(store: MemoryConversationStore) -> Conversation:
    conversation = a_conversation()
    await store.create(conversation)
    turn = long_turn(conversation)
    await store.begin_turn(turn, takes_head=True)
    await store.finish_turn(finished(turn))
    return conversation


async def is_there(store: MemoryConversationStore, conversation: Conversation) -> bool:
    page, _ = await store.list_page(TENANT, limit=1000)
    return conversation.conversation_id in {one.conversation_id for one in page}


async def test_what_was_used_least_recently_goes_first() -> None:
    store = MemoryConversationStore(100_000)
    made = [await long_conversation(store) for _ in range(7)]
    await store.get(TENANT, made[0].conversation_id)  # in use again
    made += [await long_conversation(store) for _ in range(3)]
    assert store.num_bytes <= 100_000
    there = [await is_there(store, conversation) for conversation in made]
    assert there[0]
    assert not there[1]
    assert there[1:] == sorted(there[1:])
    assert sum(there) >= 7


async def test_a_running_turn_keeps_its_conversation_until_it_ends() -> None:
    now_s = 0.0
    running = set[str]()
    store = MemoryConversationStore(
        15_000, running=running, starts_s=30, ttl_s=10, clock=lambda: now_s
    )
    conversation = a_conversation()
    await store.create(conversation)
    turn = long_turn(conversation)
    await store.begin_turn(turn, takes_head=False)
    for _ in range(3):
        await long_conversation(store)
    now_s = 29.0
    running.add(turn.turn_id)
    now_s = 58.0
    assert await is_there(store, conversation)
    running.clear()
    now_s = 60.0
    assert not await is_there(store, conversation)
    assert store.num_bytes == 0


async def test_one_too_large_for_the_store_lives_only_while_it_runs() -> None:
    store = MemoryConversationStore(5_000)
    conversation = a_conversation()
    await store.create(conversation)
    turn = long_turn(conversation)
    await store.begin_turn(turn, takes_head=True)
    assert (await store.turn(TENANT, turn.turn_id)) == turn
    await store.finish_turn(finished(turn))
    with not_found():
        await store.turn(TENANT, turn.turn_id)
    assert store.num_bytes == 0


async def test_what_is_forgotten_is_not_counted() -> None:
    store = MemoryConversationStore(1 << 30)
    conversation = await long_conversation(store)
    head = (await store.get(TENANT, conversation.conversation_id)).head
    assert head is not None
    with_turn = store.num_bytes
    await store.delete_turn(TENANT, head)
    assert store.num_bytes < with_turn - 10_000
    await store.update(TENANT, conversation.conversation_id, metadata={"title": "x" * 10_000})
    assert store.num_bytes > 10_000
    await store.delete(TENANT, conversation.conversation_id)
    assert store.num_bytes == 0


async def test_a_conversation_grows_with_its_length_and_not_with_its_square() -> None:
    store = MemoryConversationStore(1 << 30)
    conversation = a_conversation()
    await store.create(conversation)
    parent, token_ids = None, array("I")
    for index in range(50):
        token_ids = token_ids + array("I", range(index * 400, (index + 1) * 400))
        parent = a_turn(conversation, parent, prompt_token_ids=token_ids)
        await store.begin_turn(parent, takes_head=False)
    # 80 kB of ids in the last prompt, and 2 MB in all of them
    assert store.num_bytes < 300_000


@pytest.mark.parametrize("num_turns", tiered([0, 10], [10]))
async def test_it_counts_what_it_takes(num_turns: int) -> None:
    store = MemoryConversationStore(1 << 40)

    async def fill() -> None:
        for _ in range(100):
            conversation, parent = a_conversation(), None
            await store.create(conversation)
            for _ in range(num_turns):
                parent = await say(store, conversation, parent)

    num_taken = await bytes_taken(fill)
    assert store.num_bytes / 2 < num_taken < 1.1 * store.num_bytes
