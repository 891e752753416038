"""What `ConversationStore` promises of turns and heads, of both stores."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import replace

import pytest

from penstock.gateway.generation.prompt_ids import rendering_of, unknown_text
from penstock.gateway.storage.conversations.records import StoredTurn, TurnStatus
from penstock.gateway.storage.conversations.store import ConversationLockedError, ConversationStore

from .conftest import Bed
from .making import TENANT, a_conversation, a_turn, finished, head_of, not_found, say


async def test_a_conversation_comes_back_as_it_was(store: ConversationStore) -> None:
    conversation = a_conversation(is_listed=False)
    await store.create(conversation)
    assert await store.get(TENANT, conversation.conversation_id) == conversation


async def test_metadata_is_replaced(store: ConversationStore) -> None:
    conversation = a_conversation()
    await store.create(conversation)
    changed = await store.update(TENANT, conversation.conversation_id, metadata={"a": "b"})
    assert changed == replace(conversation, metadata={"a": "b"})
    assert await store.get(TENANT, conversation.conversation_id) == changed


async def test_turns_come_back_as_they_were(store: ConversationStore) -> None:
    conversation = a_conversation()
    await store.create(conversation)
    turn = a_turn(conversation)
    await store.begin_turn(turn, takes_head=True)
    assert await store.turn(TENANT, turn.turn_id) == turn
    turn = finished(turn)
    await store.finish_turn(turn)
    assert await store.turn(TENANT, turn.turn_id) == turn
    assert await store.path(TENANT, turn.turn_id) == [turn]


async def test_what_made_a_turns_ids_comes_back(store: ConversationStore) -> None:
    conversation = a_conversation()
    await store.create(conversation)
    turn = finished(a_turn(conversation, prompt=rendering_of("Hi", b"origin")))
    unknown = finished(a_turn(conversation, prompt=unknown_text(b"origin")))
    for each in (turn, unknown):
        await store.begin_turn(each, takes_head=False)
        await store.finish_turn(each)
        assert await store.turn(TENANT, each.turn_id) == each


async def test_a_path_leads_from_the_root_through_one_branch(store: ConversationStore) -> None:
    conversation = a_conversation()
    await store.create(conversation)
    first = await say(store, conversation)
    second = await say(store, conversation, first)
    sibling = await say(store, conversation, first, takes_head=False)
    third = await say(store, conversation, second)
    assert await store.path(TENANT, third.turn_id) == [first, second, third]
    assert await store.path(TENANT, sibling.turn_id) == [first, sibling]


async def test_long_prompts_come_back_though_turns_share_them(store: ConversationStore) -> None:
    conversation = a_conversation()
    await store.create(conversation)
    path: list[StoredTurn] = []
    token_ids = array("I")
    for index in range(8):
        token_ids = token_ids + array("I", range(index, 100_000, 97 + index))
        parent = path[-1] if path else None
        turn = finished(a_turn(conversation, parent, prompt_token_ids=token_ids))
        await store.begin_turn(turn, takes_head=True)
        await store.finish_turn(turn)
        path.append(turn)
    assert await store.path(TENANT, path[-1].turn_id) == path
    assert await store.turn(TENANT, path[5].turn_id) == path[5]
    await store.delete_turn(TENANT, path[5].turn_id)  # what the others share with it stays
    assert await store.turn(TENANT, path[7].turn_id) == path[7]
    assert await store.path(TENANT, path[4].turn_id) == path[:5]


async def test_a_running_turn_holds_the_head(store: ConversationStore) -> None:
    conversation = a_conversation()
    await store.create(conversation)
    running = a_turn(conversation)
    await store.begin_turn(running, takes_head=True)
    shown = await store.get(TENANT, conversation.conversation_id)
    assert (shown.head, shown.running) == (None, running.turn_id)
    with pytest.raises(ConversationLockedError) as caught:
        await store.begin_turn(a_turn(conversation), takes_head=True)
    assert (caught.value.status, caught.value.code) == (409, "conversation_locked")
    assert caught.value.headers["x-should-retry"] == "false"
    for parent in (None, running):  # siblings never conflict
        await store.begin_turn(a_turn(conversation, parent), takes_head=False)
    await store.finish_turn(finished(running))
    shown = await store.get(TENANT, conversation.conversation_id)
    assert (shown.head, shown.running) == (running.turn_id, None)


async def test_the_head_that_moved_is_not_taken(store: ConversationStore) -> None:
    conversation = a_conversation()
    await store.create(conversation)
    first = await say(store, conversation)
    await say(store, conversation, first)
    for parent in (None, first):
        with pytest.raises(ConversationLockedError):
            await store.begin_turn(a_turn(conversation, parent), takes_head=True)


@pytest.mark.parametrize(
    ("status", "moves"),
    [("completed", True), ("incomplete", True), ("cancelled", True), ("failed", False)],
)
async def test_what_ended_moves_the_head_unless_it_failed(
    store: ConversationStore, status: TurnStatus, moves: bool
) -> None:
    conversation = a_conversation()
    await store.create(conversation)
    turn = await say(store, conversation, status=status)
    assert await head_of(store, conversation) == (turn.turn_id if moves else None)
    assert (await store.turn(TENANT, turn.turn_id)).status == status
    await say(store, conversation, turn if moves else None)  # it is not locked


async def test_a_sibling_does_not_move_the_head(store: ConversationStore) -> None:
    conversation = a_conversation()
    await store.create(conversation)
    first = await say(store, conversation)
    await say(store, conversation, None, takes_head=False)
    assert await head_of(store, conversation) == first.turn_id


async def test_beginning_and_finishing_can_be_repeated(store: ConversationStore) -> None:
    conversation = a_conversation()
    await store.create(conversation)
    turn = a_turn(conversation)
    for _ in range(2):
        await store.begin_turn(turn, takes_head=True)
    done = finished(turn)
    await store.finish_turn(done)
    later = await say(store, conversation, done)
    await store.finish_turn(done)
    await store.finish_turn(finished(turn, "failed"))
    assert await store.turn(TENANT, turn.turn_id) == done
    assert await head_of(store, conversation) == later.turn_id
    assert len(await store.tree(TENANT, conversation.conversation_id)) == 2


async def test_one_of_many_wins_the_head(bed: Bed) -> None:
    store = bed.store()
    conversation = a_conversation()
    await store.create(conversation)
    turns = [a_turn(conversation) for _ in range(50)]
    results = await asyncio.gather(
        *(store.begin_turn(turn, takes_head=True) for turn in turns), return_exceptions=True
    )
    lost = [result for result in results if result is not None]
    assert len(lost) == 49
    assert all(isinstance(result, ConversationLockedError) for result in lost)
    assert len(await store.tree(TENANT, conversation.conversation_id)) == 1


async def test_a_turn_whose_runner_is_gone_lets_go_of_the_head(bed: Bed) -> None:
    store = bed.store(starts_s=300)
    conversation = a_conversation()
    await store.create(conversation)
    dead = a_turn(conversation)
    await store.begin_turn(dead, takes_head=True)
    await bed.let_pass(200)  # it is about to have a log
    assert (await store.turn(TENANT, dead.turn_id)).status == "in_progress"
    await bed.let_pass(101)
    assert (await store.turn(TENANT, dead.turn_id)).status == "failed"
    key = (TENANT, conversation.conversation_id)
    assert (await store.get(*key)).running is None
    bed.running.add(dead.turn_id)  # another gateway has taken it over
    assert (await store.turn(TENANT, dead.turn_id)).status == "in_progress"
    shown, summaries = await store.get(*key), await store.tree(*key)
    assert (shown.running, summaries[0].status) == (dead.turn_id, "in_progress")
    assert (await store.list_page(TENANT, limit=1))[0][0].running == dead.turn_id
    with pytest.raises(ConversationLockedError):
        await store.begin_turn(a_turn(conversation), takes_head=True)
    bed.running.clear()
    await bed.let_pass(2)
    heir = a_turn(conversation)
    await store.begin_turn(heir, takes_head=True)
    await store.finish_turn(finished(dead))  # too late for the head, but what it said is kept
    assert await head_of(store, conversation) is None
    assert (await store.turn(TENANT, dead.turn_id)).status == "completed"
    await store.finish_turn(finished(heir))
    assert await head_of(store, conversation) == heir.turn_id


async def test_items_are_added_behind_the_head(store: ConversationStore) -> None:
    conversation = a_conversation()
    await store.create(conversation)
    first = await say(store, conversation)
    added = a_turn(conversation, status="completed")
    await store.add_items(added)
    assert await store.turn(TENANT, added.turn_id) == replace(added, parent_id=first.turn_id)
    assert await head_of(store, conversation) == added.turn_id
    await store.begin_turn(a_turn(conversation, added), takes_head=True)
    with pytest.raises(ConversationLockedError):
        await store.add_items(a_turn(conversation, status="completed"))


async def test_items_are_replaced(store: ConversationStore) -> None:
    conversation = a_conversation()
    await store.create(conversation)
    turn = replace(await say(store, conversation), items=(), output=())
    await store.replace_items(turn)
    assert await store.turn(TENANT, turn.turn_id) == turn
    with not_found():
        await store.replace_items(a_turn(conversation))


async def test_a_tree_lists_parents_before_children(store: ConversationStore) -> None:
    conversation = a_conversation()
    await store.create(conversation)
    turns = [await say(store, conversation)]
    for index in range(1, 12):
        turns.append(await say(store, conversation, turns[index // 2], takes_head=False))
    summaries = await store.tree(TENANT, conversation.conversation_id)
    assert [node.turn_id for node in summaries] == [turn.turn_id for turn in turns]
    assert [node.parent_id for node in summaries] == [turn.parent_id for turn in turns]
    assert {(node.status, node.created_at) for node in summaries} == {("completed", 1_700_000_001)}


async def test_the_head_is_compared_and_set(store: ConversationStore) -> None:
    conversation = a_conversation()
    await store.create(conversation)
    first = await say(store, conversation)
    second = await say(store, conversation, first)
    key = (TENANT, conversation.conversation_id)
    with pytest.raises(ConversationLockedError):
        await store.set_head(*key, None, expected=first.turn_id)
    with not_found():
        await store.set_head(*key, a_turn(conversation).turn_id, expected=second.turn_id)
    await store.set_head(*key, first.turn_id, expected=second.turn_id)
    assert await head_of(store, conversation) == first.turn_id
    await store.set_head(*key, None, expected=first.turn_id)
    assert await head_of(store, conversation) is None
    await store.begin_turn(a_turn(conversation), takes_head=True)
    with pytest.raises(ConversationLockedError):
        await store.set_head(*key, first.turn_id, expected=None)
