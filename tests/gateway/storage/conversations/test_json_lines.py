"""Export and import: a line of JSON restores the same tree in any store."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import orjson
import pytest

from penstock.engine.request import ImageInput
from penstock.gateway.storage.conversations.json_lines import (
    LineError,
    line_of,
    read_line,
    restore,
)
from penstock.gateway.storage.conversations.memory_store import MemoryConversationStore
from penstock.gateway.storage.conversations.records import Conversation, StoredTurn
from penstock.gateway.storage.conversations.store import (
    ConversationStore,
    NotFoundError,
    StoreUnavailableError,
    store_unavailable,
)

from .making import TENANT, a_conversation, a_turn, finished, say


async def read_all(
    store: ConversationStore, conversation_id: str
) -> tuple[Conversation, list[StoredTurn]]:
    turns = await store.tree(TENANT, conversation_id)
    stored = [await store.turn(TENANT, turn.turn_id) for turn in turns]
    return await store.get(TENANT, conversation_id), stored


async def a_tree(store: ConversationStore) -> Conversation:
    """Branches, an image, a pin, a failed turn, a head that is not the newest turn."""
    conversation = a_conversation(is_pinned=True)
    await store.create(conversation)
    first = await say(store, conversation)
    image = ImageInput(digest="ab" * 32, offset=1, num_tokens=1, num_features=4)
    ids = first.prompt_token_ids + first.output_token_ids + array("I", [5, 6])
    second = a_turn(conversation, first, prompt_token_ids=ids, places=(image,))
    second = finished(replace(second, images={image.digest: b"\x89PNG"}))
    await store.begin_turn(second, takes_head=True)
    await store.finish_turn(second)
    await say(store, conversation, first, takes_head=False)
    await say(store, conversation, second, status="failed", takes_head=False)
    return conversation


async def test_a_line_restores_the_same_tree(store: ConversationStore) -> None:
    source = MemoryConversationStore(1 << 30)
    conversation = await a_tree(source)
    there = await read_all(source, conversation.conversation_id)
    line = line_of(*there)
    assert await restore(store, *read_line(line))
    here = await read_all(store, conversation.conversation_id)
    assert here[0] == there[0]
    # Items come back as lists and dicts; the engine's key of the KV is not exported.
    assert line_of(*here) == line
    assert [turn.prompt_token_ids for turn in here[1]] == [
        turn.prompt_token_ids for turn in there[1]
    ]
    assert {turn.prefix_id for turn in here[1]} == {None}
    assert not await restore(store, *read_line(line))  # it is there


async def test_a_deleted_turn_stays_deleted(store: ConversationStore) -> None:
    source = MemoryConversationStore(1 << 30)
    conversation = a_conversation()
    await source.create(conversation)
    first = await say(source, conversation)
    second = await say(source, conversation, first)
    await source.delete_turn(TENANT, first.turn_id)
    line = line_of(*await read_all(source, conversation.conversation_id))
    assert await restore(store, *read_line(line))
    with pytest.raises(NotFoundError):
        await store.path(TENANT, second.turn_id)
    assert [turn.turn_id for turn in await store.tree(TENANT, conversation.conversation_id)] == [
        second.turn_id
    ]


@pytest.mark.parametrize("is_killed", [False, True])
@pytest.mark.parametrize("name", ["begin_turn", "finish_turn", "set_head"])
async def test_a_conversation_is_restored_whole_or_not_at_all(
    store: ConversationStore, monkeypatch: pytest.MonkeyPatch, name: str, is_killed: bool
) -> None:
    source = MemoryConversationStore(1 << 30)
    conversation = await a_tree(source)
    line = line_of(*await read_all(source, conversation.conversation_id))
    real, num_calls = getattr(store, name), 0

    async def fails(*args: Any, **settings: Any) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls >= 2 or name == "set_head":
            raise store_unavailable("the disk is full")
        await real(*args, **settings)

    with monkeypatch.context() as patched:
        patched.setattr(store, name, fails)
        if is_killed:  # nothing is undone
            patched.setattr(store, "delete", fails)
        with pytest.raises(StoreUnavailableError):
            await restore(store, *read_line(line))
    if not is_killed:
        with pytest.raises(NotFoundError):
            await store.get(TENANT, conversation.conversation_id)
    assert await restore(store, *read_line(line))
    assert line_of(*await read_all(store, conversation.conversation_id)) == line


async def test_a_conversation_in_which_somebody_went_on_stays_as_it_is(
    store: ConversationStore,
) -> None:
    source = MemoryConversationStore(1 << 30)
    conversation = await a_tree(source)
    line = line_of(*await read_all(source, conversation.conversation_id))
    await store.create(replace(conversation, head=None))
    own = await say(store, conversation, takes_head=False)
    assert not await restore(store, *read_line(line))
    assert await store.turn(TENANT, own.turn_id)


async def test_what_was_said_is_readable(store: ConversationStore) -> None:
    conversation = a_conversation()
    await store.create(conversation)
    await say(store, conversation)
    line = orjson.loads(line_of(*await read_all(store, conversation.conversation_id)))
    (turn,) = line["turns"]
    assert line["metadata"] == {"title": "Wörter"}
    assert turn["input"][0]["content"] == [{"text": "Hi 😀", "n": 1}]
    assert turn["output"][0]["content"] == [{"text": "Hello"}]


async def test_a_long_conversation_grows_linearly() -> None:
    store = MemoryConversationStore(1 << 30)
    conversation = a_conversation()
    await store.create(conversation)
    parent, ids, sizes = None, array("I"), []
    for _ in range(20):
        ids = ids + array("I", range(100_000, 100_500))
        turn = a_turn(conversation, parent, prompt_token_ids=ids)
        await store.begin_turn(turn, takes_head=True)
        parent = replace(finished(turn), output_token_ids=array("I", [1]))
        await store.finish_turn(parent)
        ids = ids + array("I", [1])
        sizes.append(len(line_of(*await read_all(store, conversation.conversation_id))))
    assert sizes[-1] - sizes[-2] <= 1.01 * (sizes[1] - sizes[0])


_ID = "conv_" + "0" * 24
_TURN = "resp_" + "0" * 24 + "1" * 24


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ({"format": 2}, "format 2 is not known"),
        ({"id": "conv_1"}, "is not the id of a conversation"),
        ({"id": _TURN}, "is not the id of a conversation"),
        ({"turns": [{"id": "resp_" + "2" * 48, "status": "completed", "created_at": 1}]},
         "is not the id of a turn"),
        ({"turns": [{"id": _TURN, "status": "odd", "created_at": 1}]}, r"turns\[0\].status"),
        ({"turns": [{"id": _TURN, "status": "completed", "created_at": 1, "num_shared": 1}]},
         "num_shared"),
        ({"turns": [{"id": _TURN, "status": "completed", "created_at": 1,
                     "prompt_token_ids": [-1]}]}, "token ids"),
        ({"head": _TURN}, "head"),
        ({"more": 1}, "more"),
    ],
)  # fmt: skip
def test_a_wrong_line_is_refused(line: dict[str, object], fault: str) -> None:
    with pytest.raises(LineError, match=fault):
        read_line(orjson.dumps({"format": 1, "id": _ID, "tenant": "a", "created_at": 1} | line))


def test_a_line_that_is_not_json_is_refused() -> None:
    with pytest.raises(LineError):
        read_line(b"{")
