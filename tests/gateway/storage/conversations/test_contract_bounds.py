"""What `ConversationStore` promises of forgetting, tenants and listings, of both stores."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.gateway.storage.conversations.ids import new_turn_id
from penstock.gateway.storage.conversations.records import StoredTurn
from penstock.gateway.storage.conversations.store import (
    ConversationLockedError,
    ConversationStore,
)
from penstock.gateway.storage.tenant_shares import StoreLimitError

from .conftest import Bed
from .making import TENANT, a_conversation, a_turn, finished, head_of, not_found, say


async def test_a_forgotten_turn_cannot_be_continued(store: ConversationStore) -> None:
    conversation = a_conversation()
    await store.create(conversation)
    first = await say(store, conversation)
    second = await say(store, conversation, first)
    third = await say(store, conversation, second)
    await store.delete_turn(TENANT, second.turn_id)
    assert await store.turn(TENANT, third.turn_id) == third
    for gone in (store.path(TENANT, third.turn_id), store.turn(TENANT, second.turn_id)):
        with not_found():
            await gone
    with not_found():
        await store.delete_turn(TENANT, second.turn_id)
    with not_found():
        await store.begin_turn(a_turn(conversation, second), takes_head=False)
    assert await head_of(store, conversation) == first.turn_id  # what is behind cannot be it
    with not_found():
        await store.set_head(
            TENANT, conversation.conversation_id, third.turn_id, expected=first.turn_id
        )
    await store.delete_turn(TENANT, third.turn_id)
    assert await head_of(store, conversation) == first.turn_id
    await say(store, conversation, first)  # the conversation goes on


async def test_turns_after_a_deleted_one_continue_the_one_before_it(
    store: ConversationStore,
) -> None:
    conversation = a_conversation()
    await store.create(conversation)
    first = await say(store, conversation)
    second = await say(store, conversation, first)
    third = await say(store, conversation, second)
    await store.delete_turn(TENANT, second.turn_id, joins=True)
    assert await head_of(store, conversation) == third.turn_id
    await store.delete_turn(TENANT, first.turn_id, joins=True)
    kept = replace(third, parent_id=None)
    assert await store.path(TENANT, third.turn_id) == [kept]
    assert await store.turn(TENANT, third.turn_id) == kept
    running = a_turn(conversation, third)
    await store.begin_turn(running, takes_head=False)
    with pytest.raises(ConversationLockedError):
        await store.delete_turn(TENANT, third.turn_id, joins=True)
    await store.finish_turn(finished(running))
    await store.delete_turn(TENANT, third.turn_id, joins=True)
    assert await head_of(store, conversation) is None
    [left] = await store.tree(TENANT, conversation.conversation_id)
    assert (left.turn_id, left.parent_id) == (running.turn_id, None)


async def test_a_running_turn_behind_a_forgotten_one_does_not_become_the_head(
    store: ConversationStore,
) -> None:
    conversation = a_conversation()
    await store.create(conversation)
    first = await say(store, conversation)
    second = await say(store, conversation, first)
    running = a_turn(conversation, second)
    await store.begin_turn(running, takes_head=True)
    await store.delete_turn(TENANT, second.turn_id)
    await store.finish_turn(finished(running))
    shown = await store.get(TENANT, conversation.conversation_id)
    assert (shown.head, shown.running) == (first.turn_id, None)


async def test_the_head_goes_back_to_the_parent(store: ConversationStore) -> None:
    conversation = a_conversation()
    await store.create(conversation)
    first = await say(store, conversation)
    second = await say(store, conversation, first)
    await store.delete_turn(TENANT, second.turn_id)
    assert await head_of(store, conversation) == first.turn_id


async def test_a_running_turn_that_is_deleted_stays_deleted(store: ConversationStore) -> None:
    conversation = a_conversation()
    await store.create(conversation)
    turn = a_turn(conversation)
    await store.begin_turn(turn, takes_head=True)
    await store.delete_turn(TENANT, turn.turn_id)
    await store.finish_turn(finished(turn))
    with not_found():
        await store.turn(TENANT, turn.turn_id)
    await say(store, conversation)  # nothing holds the head


async def test_a_conversation_is_forgotten_with_its_turns(store: ConversationStore) -> None:
    conversation = a_conversation()
    await store.create(conversation)
    turn = await say(store, conversation)
    running = a_turn(conversation, turn)
    await store.begin_turn(running, takes_head=True)
    await store.delete(TENANT, conversation.conversation_id)
    await store.finish_turn(finished(running))
    for gone in (
        store.get(TENANT, conversation.conversation_id),
        store.delete(TENANT, conversation.conversation_id),
        store.tree(TENANT, conversation.conversation_id),
        store.turn(TENANT, turn.turn_id),
        store.path(TENANT, running.turn_id),
    ):
        with not_found():
            await gone
    assert await store.list_page(TENANT, limit=10) == ([], False)


async def test_an_unlisted_tree_goes_with_its_last_turn(store: ConversationStore) -> None:
    conversation = a_conversation(is_listed=False)
    await store.create(conversation)
    turn = await say(store, conversation, takes_head=False)
    await store.delete_turn(TENANT, turn.turn_id)
    with not_found():
        await store.get(TENANT, conversation.conversation_id)


async def test_another_tenant_finds_nothing(store: ConversationStore) -> None:
    conversation = a_conversation()
    await store.create(conversation)
    turn = await say(store, conversation)
    other, key = "tenant b", conversation.conversation_id
    foreign = a_turn(replace(conversation, tenant=other))
    for forbidden in (
        store.get(other, key),
        store.update(other, key, metadata={}),
        store.delete(other, key),
        store.tree(other, key),
        store.set_head(other, key, None, expected=turn.turn_id),
        store.turn(other, turn.turn_id),
        store.path(other, turn.turn_id),
        store.delete_turn(other, turn.turn_id),
        store.begin_turn(foreign, takes_head=False),
        store.add_items(foreign),
        store.replace_items(replace(turn, tenant=other)),
    ):
        with not_found():
            await forbidden
    await store.finish_turn(replace(turn, tenant=other, status="failed"))
    assert await store.list_page(other, limit=10) == ([], False)
    assert await store.path(TENANT, turn.turn_id) == [turn]
    assert await head_of(store, conversation) == turn.turn_id


@pytest.mark.parametrize("id_", ["", "conv_x", "resp_x", "conv_" + "0" * 25, "}{", "a\x00b\n"])
async def test_a_malformed_id_is_not_found(store: ConversationStore, id_: str) -> None:
    for gone in (
        store.get(TENANT, id_),
        store.delete(TENANT, id_),
        store.turn(TENANT, id_),
        store.path(TENANT, id_),
        store.delete_turn(TENANT, id_),
        store.list_page(TENANT, limit=1, after=id_ or "x"),
    ):
        with not_found():
            await gone


async def test_pages_follow_each_other(store: ConversationStore) -> None:
    made = [a_conversation(created_at=1_700_000_000 + index // 2) for index in range(7)]
    for conversation in made:
        await store.create(conversation)
    await store.create(a_conversation(is_listed=False))
    await store.create(a_conversation(tenant="tenant b"))
    made.sort(key=lambda one: (one.created_at, one.conversation_id))
    for newest_first in (False, True):
        expected = made[::-1] if newest_first else made
        found, after, has_more = [], None, True
        while has_more:
            page, has_more = await store.list_page(
                TENANT, limit=3, after=after, newest_first=newest_first
            )
            assert len(page) == 3 or not has_more
            found += page
            after = page[-1].conversation_id
        assert found == expected
    assert await store.list_page(TENANT, limit=7) == (made[::-1], False)


async def test_the_last_used_is_listed_first(store: ConversationStore) -> None:
    """By the newest turn, also of one that began later and ended earlier; to rename is no use."""
    start = 1_700_000_000
    old, used, grown, new = [a_conversation(created_at=start + index) for index in range(4)]
    for conversation in (old, used, grown, new):
        await store.create(conversation)
    turns = [a_turn(used, created_at=start + seconds) for seconds in (200, 100)]
    for turn in turns:
        await store.begin_turn(turn, takes_head=False)
        await store.finish_turn(finished(turn))
    await store.add_items(a_turn(grown, status="completed", created_at=start + 150))
    await store.update(TENANT, old.conversation_id, metadata={"title": "renamed"})
    await store.update(TENANT, used.conversation_id, metadata={"title": "renamed"})
    page, _ = await store.list_page(TENANT, limit=10)
    expected = [each.conversation_id for each in (used, grown, new, old)]
    assert [each.conversation_id for each in page] == expected
    rest, _ = await store.list_page(TENANT, limit=10, after=expected[1])
    assert [each.conversation_id for each in rest] == expected[2:]


async def test_what_is_not_used_is_forgotten(bed: Bed) -> None:
    store = bed.store(ttl_s=300)
    if store.kind == "disk":
        pytest.skip("what is on disk does not expire")
    conversation = a_conversation()
    await store.create(conversation)
    turn = await say(store, conversation)
    await bed.let_pass(200)
    page, _ = await store.list_page(TENANT, limit=10)  # this is no use of it
    assert [each.conversation_id for each in page] == [conversation.conversation_id]
    await bed.let_pass(101)
    assert await store.list_page(TENANT, limit=10) == ([], False)
    for gone in (
        store.get(TENANT, conversation.conversation_id),
        store.turn(TENANT, turn.turn_id),
        store.begin_turn(a_turn(conversation, turn), takes_head=True),
    ):
        with not_found():
            await gone


async def test_items_without_a_response_are_bounded(store: ConversationStore) -> None:
    """Whoever reads a conversation decodes all of them, and no context bounds them."""
    conversation = a_conversation()
    await store.create(conversation)

    def items() -> StoredTurn:
        content = [{"text": "x" * 3_000_000}]
        return a_turn(
            conversation,
            turn_id=new_turn_id(conversation.conversation_id),
            items=({"id": "msg_1", "role": "user", "content": content},),
        )

    added = [items(), items()]
    for turn in added:
        await store.add_items(turn)
    with pytest.raises(StoreLimitError, match="8388608 bytes") as caught:
        await store.add_items(items())
    assert (caught.value.status, caught.value.param) == (413, "items")
    assert await head_of(store, conversation) == added[1].turn_id
    answered = await say(store, conversation, added[1])  # a response is bounded by its context
    await store.delete_turn(TENANT, added[0].turn_id)
    await store.add_items(items())
    assert (await store.turn(TENANT, answered.turn_id)).parent_id == added[1].turn_id
