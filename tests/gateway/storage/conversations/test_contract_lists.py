"""What `ConversationStore` promises of pins, searches and counts, of all stores."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.gateway.errors import RequestRefusedError
from penstock.gateway.storage.conversations.ids import new_turn_id
from penstock.gateway.storage.conversations.records import Conversation, SearchHit, StoredTurn
from penstock.gateway.storage.conversations.store import ConversationStore

from .making import TENANT, a_conversation, a_turn, finished, not_found, say


@pytest.fixture
def searched(store: ConversationStore) -> ConversationStore:
    """A store that can be searched."""
    if store.kind == "redis":
        pytest.skip("Redis cannot search")
    return store


def message(text: str, role: str = "user") -> dict[str, Any]:
    part = {"type": "input_text" if role == "user" else "output_text", "text": text}
    return {"id": "msg_1", "type": "message", "role": role, "content": [part]}


async def asked(
    store: ConversationStore,
    conversation: Conversation,
    question: str,
    answer: str = "Hello",
    **fields: Any,
) -> StoredTurn:
    """A turn that has ended."""
    turn = a_turn(conversation, items=(message(question),), **fields)
    await store.begin_turn(turn, takes_head=False)
    turn = finished(turn, output=(message(answer, "assistant"),))
    await store.finish_turn(turn)
    return turn


async def found(
    store: ConversationStore, query: str, *, tenant: str = TENANT, **options: Any
) -> list[SearchHit]:
    hits, _ = await store.search(tenant, query, **{"limit": 100, **options})
    return hits


async def test_the_pinned_are_listed_apart(store: ConversationStore) -> None:
    made = [a_conversation(created_at=1_700_000_000 + index) for index in range(7)]
    for conversation in made:
        await store.create(conversation)
    pinned = made[1], made[4], made[5]
    for conversation in pinned:
        changed = await store.update(TENANT, conversation.conversation_id, is_pinned=True)
        assert changed == replace(conversation, is_pinned=True)
    unpinned = await store.update(TENANT, made[4].conversation_id, is_pinned=False)
    assert unpinned == made[4]
    others = [each for each in made if each not in (made[1], made[5])]
    for newest_first in (True, False):
        page, has_more = await store.list_page(
            TENANT, limit=5, pinned=True, newest_first=newest_first
        )
        assert [each.created_at for each in page] == sorted(
            (made[1].created_at, made[5].created_at), reverse=newest_first
        )
        assert not has_more
        rest, after, has_more = [], None, True
        while has_more:
            page, has_more = await store.list_page(
                TENANT, limit=2, after=after, pinned=False, newest_first=newest_first
            )
            assert len(page) == 2 or not has_more
            rest += page
            after = page[-1].conversation_id
        assert rest == (others[::-1] if newest_first else others)


async def test_a_pinned_one_that_is_used_stays_pinned(store: ConversationStore) -> None:
    first, second = a_conversation(), a_conversation(is_pinned=True, created_at=1_700_000_005)
    for conversation in (first, second):
        await store.create(conversation)
    await store.update(TENANT, first.conversation_id, is_pinned=True)
    turn = a_turn(first, created_at=1_700_000_009)
    await store.begin_turn(turn, takes_head=True)
    await store.finish_turn(finished(turn))
    await store.update(TENANT, first.conversation_id, metadata={"title": "other"})
    page, _ = await store.list_page(TENANT, limit=5, pinned=True)
    assert [each.conversation_id for each in page] == [
        first.conversation_id,
        second.conversation_id,
    ]
    assert (page[0].is_pinned, page[0].used_at) == (True, 1_700_000_009)
    await store.delete(TENANT, first.conversation_id)
    assert [each.conversation_id for each in (await store.list_page(TENANT, limit=5))[0]] == [
        second.conversation_id
    ]


async def test_what_was_said_is_found(searched: ConversationStore) -> None:
    store, conversation = searched, a_conversation(metadata={"title": "Holidays"})
    await store.create(conversation)
    turn = await asked(
        store, conversation, "Where is the Straße to Orléans?", "By the 橋と川 there"
    )
    for query in (
        "straße", "Orleans", "ORLÉANS", "orl", "where orleans", "by straße", "橋", "橋と", "the is",
    ):  # fmt: skip
        (hit,) = await found(store, query)
        assert (hit.conversation.conversation_id, hit.turn_id) == (
            conversation.conversation_id,
            turn.turn_id,
        ), query
    for query in (
        "oulipo",
        "orleans oulipo",
        "leans",
        "th",
        "川橋",
        "user",
        "msg",
        "",
        "?!",
        '"',
        "a*",
    ):
        assert await found(store, query) == [], query
    (hit,) = await found(store, "orleans")
    assert "to Orléans?" in hit.excerpt
    (hit,) = await found(store, "holiday")
    assert (hit.turn_id, hit.excerpt) == (None, "Holidays")


async def test_a_hit_is_the_newest_turn_of_each_conversation(searched: ConversationStore) -> None:
    store, start = searched, 1_700_000_000
    made = [a_conversation(created_at=start + index) for index in range(5)]
    turns = {}
    for index, conversation in enumerate(made):
        await store.create(conversation)
        await asked(store, conversation, "an apple", created_at=start + 10 + index)
    for index in (3, 2, 0):
        turns[index] = await asked(
            store, made[index], "another apple", created_at=start + 30 - index
        )
    hits = await found(store, "apple")
    assert [hit.conversation.conversation_id for hit in hits] == [
        made[index].conversation_id for index in (0, 2, 3, 4, 1)
    ]
    assert [hit.turn_id for hit in hits[:3]] == [turns[each].turn_id for each in (0, 2, 3)]
    pages = []
    for offset in (0, 2, 4):
        page, has_more = await store.search(TENANT, "apple", limit=2, offset=offset)
        assert has_more == (offset < 4)
        pages += page
    assert pages == hits


async def test_a_search_finds_ones_own_and_what_is_listed(searched: ConversationStore) -> None:
    for fields in ({"tenant": "tenant b"}, {"is_listed": False}):
        conversation = a_conversation(**fields)
        await searched.create(conversation)
        await asked(searched, conversation, "pear")
    assert await found(searched, "pear") == []
    assert len(await found(searched, "pear", tenant="tenant b")) == 1


async def test_what_is_deleted_or_renamed_is_not_found(searched: ConversationStore) -> None:
    store, conversation = searched, a_conversation(metadata={"title": "plum"})
    await store.create(conversation)
    turn = await asked(store, conversation, "cherry", "grape")
    await store.update(TENANT, conversation.conversation_id, metadata={"title": "quince"})
    assert await found(store, "plum") == []
    assert len(await found(store, "quince")) == 1
    await store.replace_items(replace(turn, items=()))
    assert await found(store, "cherry") == []
    assert len(await found(store, "grape")) == 1
    await store.delete_turn(TENANT, turn.turn_id)
    assert await found(store, "grape") == []
    await asked(store, conversation, "melon")
    await store.delete(TENANT, conversation.conversation_id)
    for query in ("melon", "quince"):
        assert await found(store, query) == []


async def test_items_without_a_response_are_found(searched: ConversationStore) -> None:
    conversation = a_conversation()
    await searched.create(conversation)
    turn_id = new_turn_id(conversation.conversation_id)
    await searched.add_items(a_turn(conversation, turn_id=turn_id, items=(message("lemon"),)))
    (hit,) = await found(searched, "lemon")
    assert hit.turn_id == turn_id


async def test_redis_says_that_it_cannot_search(store: ConversationStore) -> None:
    if store.kind != "redis":
        pytest.skip("it can")
    with pytest.raises(RequestRefusedError, match="--data-dir") as caught:
        await store.search(TENANT, "anything", limit=1)
    assert (caught.value.status, caught.value.code) == (501, "search_not_supported")


async def test_what_a_tenant_has_is_counted(store: ConversationStore) -> None:
    assert (await store.holdings(TENANT)).num_conversations == 0
    for fields in ({}, {}, {"is_listed": False}, {"tenant": "tenant b"}):
        conversation = a_conversation(**fields)
        await store.create(conversation)
        await say(store, conversation)
    held = await store.holdings(TENANT)
    assert held.num_conversations == 2
    assert held.num_bytes is None or held.num_bytes > 3000


async def test_a_pin_of_another_tenant_is_not_found(store: ConversationStore) -> None:
    conversation = a_conversation()
    await store.create(conversation)
    with not_found():
        await store.update("tenant b", conversation.conversation_id, is_pinned=True)
    assert not (await store.get(TENANT, conversation.conversation_id)).is_pinned
