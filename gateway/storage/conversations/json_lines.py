"""Conversations as lines of JSON, for export and import: a line has one with all its turns.

A line has everything of which the same tree can be made again, in any store: what was said in the
API's items, images as base64, and token ids, which an exact continuation needs. What a turn's
prompt has in common with its parent is said as a number, so a line grows linearly with a
conversation. Left out is what belongs to an engine (`prefix_id`).
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import orjson
from msgspec import Struct

from penstock.engine.request import ImageInput
from penstock.gateway.errors import RequestRefusedError
from penstock.gateway.storage.conversations.ids import conversation_of, tree_of
from penstock.gateway.storage.conversations.records import (
    Conversation,
    Rendering,
    StoredTurn,
    TurnStatus,
)
from penstock.gateway.storage.conversations.store import ConversationStore, NotFoundError

FORMAT = 1


class LineError(ValueError):
    """A line is not a conversation; the text says where it is wrong."""


class _Text(Struct, omit_defaults=True, forbid_unknown_fields=True):
    """A `Rendering`."""

    num_chars: int
    digest: bytes
    origin: bytes = b""


class _Place(Struct, omit_defaults=True, forbid_unknown_fields=True):
    """Where an image is in a prompt."""

    digest: str
    offset: int
    num_tokens: int
    num_features: int


class _Turn(Struct, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """
    Attributes:
        num_shared: how many token ids of the prompt are the parent's, its answer's included.
        prompt_token_ids: those after them.
    """

    id: str
    parent: str | None = None
    status: TurnStatus
    created_at: int
    input: tuple[dict[str, Any], ...] = ()
    output: tuple[dict[str, Any], ...] = ()
    response: dict[str, Any] | None = None
    continues: bool = False
    images: dict[str, bytes] = {}
    places: tuple[_Place, ...] = ()
    num_shared: int = 0
    prompt_token_ids: tuple[int, ...] = ()
    output_token_ids: tuple[int, ...] = ()
    prompt_text: _Text | None = None
    whole_text: _Text | None = None
    cache_salt: str = ""


class _Line(Struct, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    format: int
    id: str
    tenant: str
    created_at: int
    is_listed: bool = True
    is_pinned: bool = False
    metadata: dict[str, str] = {}
    head: str | None = None
    turns: tuple[_Turn, ...] = ()


def line_of(conversation: Conversation, turns: Sequence[StoredTurn]) -> bytes:
    """
    Args:
        turns: parents before children.

    Returns:
        JSON with a line feed.
    """
    ids: dict[str | None, array[int]] = {}
    described = []
    for turn in turns:
        described.append(_described(turn, ids.get(turn.parent_id, array("I"))))
        ids[turn.turn_id] = turn.prompt_token_ids + turn.output_token_ids
    line = _Line(
        format=FORMAT,
        id=conversation.conversation_id,
        tenant=conversation.tenant,
        created_at=conversation.created_at,
        is_listed=conversation.is_listed,
        is_pinned=conversation.is_pinned,
        metadata=dict(conversation.metadata),
        head=conversation.head,
        turns=tuple(described),
    )
    return msgspec.json.encode(line) + b"\n"


def _described(turn: StoredTurn, of_parent: array[int]) -> _Turn:
    prompt = turn.prompt_token_ids
    num_shared = len(of_parent) if prompt[: len(of_parent)] == of_parent else 0
    return _Turn(
        id=turn.turn_id,
        parent=turn.parent_id,
        status=turn.status,
        created_at=turn.created_at,
        input=tuple(map(dict, turn.items)),
        output=tuple(map(dict, turn.output)),
        response=orjson.loads(turn.response) if turn.response else None,
        continues=turn.continues,
        images=dict(turn.images),
        places=tuple(
            _Place(each.digest, each.offset, each.num_tokens, each.num_features)
            for each in turn.places
        ),
        num_shared=num_shared,
        prompt_token_ids=tuple(prompt[num_shared:]),
        output_token_ids=tuple(turn.output_token_ids),
        prompt_text=_text(turn.prompt),
        whole_text=_text(turn.whole),
        cache_salt=turn.cache_salt,
    )


def _text(rendering: Rendering | None) -> _Text | None:
    return (
        None
        if rendering is None
        else _Text(rendering.num_chars, rendering.digest, rendering.origin)
    )


def read_line(line: bytes) -> tuple[Conversation, list[StoredTurn]]:
    """The inverse of `line_of`; a turn that ran is `failed`.

    Raises:
        LineError.
    """
    try:
        read = msgspec.json.decode(line, type=_Line)
    except msgspec.MsgspecError as error:
        raise LineError(str(error)) from error
    if read.format != FORMAT:
        raise LineError(f"format {read.format} is not known, only {FORMAT}")
    if tree_of(read.id) is None or not read.id.startswith("conv_"):
        raise LineError(f"{read.id!r} is not the id of a conversation")
    ids: dict[str, array[int]] = {}
    turns = []
    for described in read.turns:
        if conversation_of(described.id) != read.id or described.id in ids:
            raise LineError(f"{described.id!r} is not the id of a turn of {read.id!r}")
        turn = _turn(read, described, ids.get(described.parent or "", array("I")))
        ids[described.id] = turn.prompt_token_ids + turn.output_token_ids
        turns.append(turn)
    if read.head is not None and read.head not in ids:
        raise LineError(f"head {read.head!r} is not one of the turns")
    conversation = Conversation(
        conversation_id=read.id,
        tenant=read.tenant,
        created_at=read.created_at,
        is_listed=read.is_listed,
        is_pinned=read.is_pinned,
        metadata=read.metadata,
        head=read.head,
    )
    return conversation, turns


def _turn(line: _Line, described: _Turn, of_parent: array[int]) -> StoredTurn:
    if not 0 <= described.num_shared <= len(of_parent):
        raise LineError(f"num_shared of {described.id!r} is more than its parent has")
    try:
        own, output = (
            array("I", ids) for ids in (described.prompt_token_ids, described.output_token_ids)
        )
    except OverflowError as error:
        raise LineError(f"token ids of {described.id!r}: {error}") from error
    return StoredTurn(
        turn_id=described.id,
        conversation_id=line.id,
        tenant=line.tenant,
        parent_id=described.parent,
        status="failed" if described.status == "in_progress" else described.status,
        created_at=described.created_at,
        items=described.input,
        output=described.output,
        continues=described.continues,
        prompt_token_ids=of_parent[: described.num_shared] + own,
        output_token_ids=output,
        prompt=_rendering(described.prompt_text),
        whole=_rendering(described.whole_text),
        cache_salt=described.cache_salt,
        images=described.images,
        places=tuple(
            ImageInput(
                digest=each.digest,
                offset=each.offset,
                num_tokens=each.num_tokens,
                num_features=each.num_features,
            )
            for each in described.places
        ),
        response=b"" if described.response is None else orjson.dumps(described.response),
    )


def _rendering(text: _Text | None) -> Rendering | None:
    if text is None:
        return None
    return Rendering(num_chars=text.num_chars, digest=text.digest, origin=text.origin)


async def restore(
    store: ConversationStore, conversation: Conversation, turns: Sequence[StoredTurn]
) -> bool:
    """Store a conversation that was read, all of it or nothing; False: one of its id is there, and
    stays as it is. What a killed import has left is no conversation: it is made anew.

    Raises:
        RequestRefusedError: it does not fit, or nothing can be stored now.
    """
    tenant, conversation_id = conversation.tenant, conversation.conversation_id
    with contextlib.suppress(NotFoundError):
        there = await store.get(tenant, conversation_id)
        if there.head is not None or conversation.head is None:
            return False
        known = {turn.turn_id for turn in turns} | {turn.parent_id for turn in turns}
        if any(each.turn_id not in known for each in await store.tree(tenant, conversation_id)):
            return False  # somebody has gone on in it
        await store.delete(tenant, conversation_id)
    await store.create(replace(conversation, head=None))
    try:
        await _restore_turns(store, conversation, turns)
    except BaseException:
        # If that fails too, the next import finds a conversation without a head.
        with contextlib.suppress(RequestRefusedError):
            await store.delete(tenant, conversation_id)
        raise
    return True


async def _restore_turns(
    store: ConversationStore, conversation: Conversation, turns: Sequence[StoredTurn]
) -> None:
    """The head is set last."""
    tenant, conversation_id = conversation.tenant, conversation.conversation_id
    there = {turn.turn_id for turn in turns}
    # Turns that were deleted, and had others after them: what follows cannot be continued.
    gone = [turn for turn in turns if turn.parent_id is not None and turn.parent_id not in there]
    for turn in gone:
        assert turn.parent_id is not None
        root = replace(turn, turn_id=turn.parent_id, parent_id=None, items=(), output=())
        await store.begin_turn(root, takes_head=False)
    for turn in turns:
        await store.begin_turn(turn, takes_head=False)
        await store.finish_turn(turn)
    for turn_id in dict.fromkeys(turn.parent_id for turn in gone):
        assert turn_id is not None
        await store.delete_turn(tenant, turn_id)
    if conversation.head is not None:
        await store.set_head(tenant, conversation_id, conversation.head, expected=None)
