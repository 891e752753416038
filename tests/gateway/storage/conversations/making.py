"""Conversations and turns to store."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from penstock.gateway.storage.conversations.ids import new_conversation_id, new_response_id
from penstock.gateway.storage.conversations.prompt_ids import rendering_of
from penstock.gateway.storage.conversations.records import (
    Conversation,
    Item,
    StoredTurn,
    TurnStatus,
)
from penstock.gateway.storage.conversations.store import ConversationStore, NotFoundError

TENANT = "tenant a"


def a_conversation(**fields: Any) -> Conversation:
    values = {
        "conversation_id": new_conversation_id(),
        "tenant": TENANT,
        "created_at": 1_700_000_000,
        "metadata": {"title": "Wörter"},
    }
    values |= fields
    return Conversation(**({"used_at": values["created_at"]} | values))


def a_turn(
    conversation: Conversation, parent: StoredTurn | None = None, **fields: Any
) -> StoredTurn:
    values = {
        "turn_id": new_response_id(conversation.conversation_id),
        "conversation_id": conversation.conversation_id,
        "tenant": conversation.tenant,
        "parent_id": None if parent is None else parent.turn_id,
        "status": "in_progress",
        "created_at": 1_700_000_001,
        "items": ({"id": "msg_1", "role": "user", "content": [{"text": "Hi 😀", "n": 1}]},),
        "prompt_token_ids": array("I", [1, 2, 4_000_000_000]),
        "prompt": rendering_of("<user>Hi"),
        "cache_salt": "salt",
    }
    return StoredTurn(**(values | fields))


ANSWER = {"id": "msg_2", "type": "message", "role": "assistant", "content": [{"text": "Hello"}]}


def finished(
    turn: StoredTurn, status: TurnStatus = "completed", output: tuple[Item, ...] = (ANSWER,)
) -> StoredTurn:
    return replace(
        turn,
        status=status,
        output=output,
        output_token_ids=array("I", [7, 8, 9]),
        whole=rendering_of("<user>Hi<assistant>Hello"),
        prefix_id=b"\x00\xff",
        response=b'{"id": "resp"}',
    )


async def say(
    store: ConversationStore,
    conversation: Conversation,
    parent: StoredTurn | None = None,
    *,
    status: TurnStatus = "completed",
    takes_head: bool = True,
) -> StoredTurn:
    """A whole turn, from its beginning to its end."""
    turn = a_turn(conversation, parent)
    await store.begin_turn(turn, takes_head=takes_head)
    turn = finished(turn, status)
    await store.finish_turn(turn)
    return turn


async def head_of(store: ConversationStore, conversation: Conversation) -> str | None:
    return (await store.get(conversation.tenant, conversation.conversation_id)).head


@contextlib.contextmanager
def not_found() -> Iterator[None]:
    with pytest.raises(NotFoundError) as caught:
        yield
    assert caught.value.status == 404
