"""Encodes a stored turn as bytes: msgpack, with four bytes per token id.

Each turn's prompt contains those before it. Its ids are cut into chunks named by their digest,
which the turns of a conversation share, so storage grows linearly with a conversation's length
instead of quadratically. The stores keep the data of the tree (ids, parent, status) separately.

In version 1 the answer is a message or nothing, in version 2 a list of items. Older gateways, which
may share this one's Redis, read version 1 only, so it is written wherever it can hold the answer.
Version 3 has images: each file is one more chunk, so a conversation stores it once.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgpack

from penstock.engine.request import ImageInput
from penstock.gateway.storage.conversations.records import Rendering, StoredTurn, TurnStatus

_MESSAGE_VERSION, _VERSION, _IMAGE_VERSION = 1, 2, 3
_NUM_NAMES = struct.Struct("<I")
NAME_BYTES = 16
CHUNK_BYTES = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeNode:
    """A turn's data in the tree, without its content."""

    turn_id: str
    conversation_id: str
    tenant: str
    parent_id: str | None
    status: TurnStatus
    created_at: int


def node_of(turn: StoredTurn) -> TreeNode:
    return TreeNode(
        turn_id=turn.turn_id,
        conversation_id=turn.conversation_id,
        tenant=turn.tenant,
        parent_id=turn.parent_id,
        status=turn.status,
        created_at=turn.created_at,
    )


@dataclass(frozen=True, slots=True)
class Packed:
    """An encoded turn.

    Attributes:
        body: number of chunks (4 bytes), their names, and msgpack of the rest.
        chunks: chunks of the prompt's token ids, and its images' files, by name.
    """

    body: bytes
    chunks: dict[bytes, bytes]

    @property
    def names(self) -> list[bytes]:
        return list(self.chunks)


def pack(turn: StoredTurn) -> Packed:
    """Encode a turn's content, without its tree node."""
    token_ids = turn.prompt_token_ids.tobytes()
    end = len(token_ids) - len(token_ids) % CHUNK_BYTES
    names = []
    chunks = {}
    for start in range(0, end, CHUNK_BYTES):
        chunk = token_ids[start : start + CHUNK_BYTES]
        names.append(_name(chunk))
        chunks[names[-1]] = chunk
    for file in turn.images.values():
        names.append(_name(file))
        chunks[names[-1]] = file
    is_one_message = [item["type"] for item in turn.output] in ([], ["message"])
    is_one_message = is_one_message and not turn.images
    images = []
    if turn.images:
        places = [(p.digest, p.offset, p.num_tokens, p.num_features) for p in turn.places]
        images = [(list(turn.images), places)]
    version = _MESSAGE_VERSION if is_one_message else _VERSION
    rest: bytes = msgpack.packb(
        (
            _IMAGE_VERSION if turn.images else version,
            turn.items,
            next(iter(turn.output), None) if is_one_message else turn.output,
            turn.continues,
            token_ids[end:],
            turn.output_token_ids.tobytes(),
            _pack_rendering(turn.prompt),
            _pack_rendering(turn.whole),
            turn.prefix_id,
            turn.cache_salt,
            turn.response,
            *images,
        )
    )
    return Packed(b"".join((_NUM_NAMES.pack(len(names)), *names, rest)), chunks)


def _name(chunk: bytes) -> bytes:
    return hashlib.blake2b(chunk, digest_size=NAME_BYTES).digest()


def chunk_names(body: bytes) -> list[bytes]:
    """The names of a body's chunks, in order.

    Raises:
        ValueError, struct.error: it is not a body.
    """
    (num_names,) = _NUM_NAMES.unpack_from(body)
    if _NUM_NAMES.size + num_names * NAME_BYTES > len(body):
        raise ValueError(f"{len(body)} bytes do not begin with {num_names} names")
    starts = range(_NUM_NAMES.size, _NUM_NAMES.size + num_names * NAME_BYTES, NAME_BYTES)
    return [body[start : start + NAME_BYTES] for start in starts]


def unpack(node: TreeNode, body: bytes, chunks: Mapping[bytes, bytes]) -> StoredTurn:
    """The inverse of `pack`; sequences within items become lists.

    Raises:
        KeyError: a chunk is missing.
    """
    names = chunk_names(body)
    packed = memoryview(body)[_NUM_NAMES.size + len(names) * NAME_BYTES :]
    version, items, output, continues, *rest = msgpack.unpackb(packed)
    assert version in (_MESSAGE_VERSION, _VERSION, _IMAGE_VERSION)
    if version == _MESSAGE_VERSION:
        output = [] if output is None else [output]
    digests, places = rest.pop() if version == _IMAGE_VERSION else ((), ())
    prompt_ids, output_ids, prompt, whole, prefix_id, cache_salt, response = rest
    num_chunks = len(names) - len(digests)
    return StoredTurn(
        turn_id=node.turn_id,
        conversation_id=node.conversation_id,
        tenant=node.tenant,
        parent_id=node.parent_id,
        status=node.status,
        created_at=node.created_at,
        items=tuple(items),
        output=tuple(output),
        continues=continues,
        prompt_token_ids=array(
            "I", b"".join((*(chunks[name] for name in names[:num_chunks]), prompt_ids))
        ),
        output_token_ids=array("I", output_ids),
        prompt=_unpack_rendering(prompt),
        whole=_unpack_rendering(whole),
        prefix_id=prefix_id,
        cache_salt=cache_salt,
        images={
            digest: chunks[name] for digest, name in zip(digests, names[num_chunks:], strict=True)
        },
        places=tuple(
            ImageInput(digest=digest, offset=offset, num_tokens=tokens, num_features=features)
            for digest, offset, tokens, features in places
        ),
        response=response,
    )


def _pack_rendering(rendering: Rendering | None) -> tuple[int | bytes, ...] | None:
    """Gateways that know of no origin read the first two."""
    if rendering is None:
        return None
    named = (rendering.origin,) if rendering.origin else ()
    return rendering.num_chars, rendering.digest, *named


def _unpack_rendering(packed: Any) -> Rendering | None:
    if packed is None:
        return None
    num_chars, digest, *origin = packed
    return Rendering(num_chars=num_chars, digest=digest, origin=origin[0] if origin else b"")
