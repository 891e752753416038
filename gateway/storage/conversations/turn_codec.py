"""A stored turn as bytes: msgpack, token ids four bytes each.

Each turn's prompt holds those before it: its ids are cut into chunks named by their digest, which
the turns of a conversation share. So a conversation grows with its length, not with its square.
What the tree of turns knows (ids, parent, status) is kept beside them, by the stores.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgpack

from penstock.gateway.storage.conversations.records import Rendering, StoredTurn, TurnStatus

_VERSION = 1
_NUM_NAMES = struct.Struct("<I")
NAME_BYTES = 16
CHUNK_BYTES = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What the tree knows of a turn."""

    turn_id: str
    conversation_id: str
    tenant: str
    parent_id: str | None
    status: TurnStatus
    created_at: int


def place_of(turn: StoredTurn) -> Place:
    return Place(
        turn_id=turn.turn_id,
        conversation_id=turn.conversation_id,
        tenant=turn.tenant,
        parent_id=turn.parent_id,
        status=turn.status,
        created_at=turn.created_at,
    )


@dataclass(frozen=True, slots=True)
class Packed:
    """A turn as bytes.

    Attributes:
        body: number of chunks (4 bytes), their names, and msgpack of the rest.
        chunks: of the prompt's token ids, by name.
    """

    body: bytes
    chunks: dict[bytes, bytes]


def pack(turn: StoredTurn) -> Packed:
    """All of a turn but its place."""
    token_ids = turn.prompt_token_ids.tobytes()
    end = len(token_ids) - len(token_ids) % CHUNK_BYTES
    names = []
    chunks = {}
    for start in range(0, end, CHUNK_BYTES):
        chunk = token_ids[start : start + CHUNK_BYTES]
        names.append(hashlib.blake2b(chunk, digest_size=NAME_BYTES).digest())
        chunks[names[-1]] = chunk
    rest: bytes = msgpack.packb(
        (
            _VERSION,
            turn.items,
            turn.output,
            turn.continues,
            token_ids[end:],
            turn.output_token_ids.tobytes(),
            _pack_rendering(turn.prompt),
            _pack_rendering(turn.whole),
            turn.prefix_id,
            turn.cache_salt,
            turn.response,
        )
    )
    return Packed(b"".join((_NUM_NAMES.pack(len(names)), *names, rest)), chunks)


def chunk_names(body: bytes) -> list[bytes]:
    """The chunks that a body needs, in order."""
    (num_names,) = _NUM_NAMES.unpack_from(body)
    starts = range(_NUM_NAMES.size, _NUM_NAMES.size + num_names * NAME_BYTES, NAME_BYTES)
    return [body[start : start + NAME_BYTES] for start in starts]


def unpack(place: Place, body: bytes, chunks: Mapping[bytes, bytes]) -> StoredTurn:
    """What `pack` was given, at its place; sequences within items come back as lists.

    Raises:
        KeyError: a chunk is missing.
    """
    names = chunk_names(body)
    packed = memoryview(body)[_NUM_NAMES.size + len(names) * NAME_BYTES :]
    version, items, output, continues, *rest = msgpack.unpackb(packed)
    assert version == _VERSION
    prompt_ids, output_ids, prompt, whole, prefix_id, cache_salt, response = rest
    return StoredTurn(
        turn_id=place.turn_id,
        conversation_id=place.conversation_id,
        tenant=place.tenant,
        parent_id=place.parent_id,
        status=place.status,
        created_at=place.created_at,
        items=tuple(items),
        output=output,
        continues=continues,
        prompt_token_ids=array("I", b"".join((*(chunks[name] for name in names), prompt_ids))),
        output_token_ids=array("I", output_ids),
        prompt=_unpack_rendering(prompt),
        whole=_unpack_rendering(whole),
        prefix_id=prefix_id,
        cache_salt=cache_salt,
        response=response,
    )


def _pack_rendering(rendering: Rendering | None) -> tuple[int, bytes] | None:
    return None if rendering is None else (rendering.num_chars, rendering.digest)


def _unpack_rendering(packed: Any) -> Rendering | None:
    return None if packed is None else Rendering(num_chars=packed[0], digest=packed[1])
