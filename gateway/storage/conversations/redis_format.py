"""The keys and values of a conversation in Redis.

    penstock:{<tree>}:conversation    hash: tenant, created_at, metadata, head, running, …
    penstock:{<tree>}:links           hash: turn → order|parent|status|created at|lease (ms)
    penstock:{<tree>}:turns           hash: turn → `turn_codec`
    penstock:{<tree>}:token_ids       hash: its chunks of token ids

Gateways up to f64993e write no version, pin and time of use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from penstock.gateway.storage.conversations import tree
from penstock.gateway.storage.conversations.records import TurnStatus
from penstock.gateway.storage.conversations.tree import Change, Node, Tree

_KEYS = ("conversation", "links", "turns", "token_ids")
_FIELDS, _LINKS, _BODIES, _CHUNKS, _EVERYTHING = 1, 2, 3, 4, 0  # as `conversation.lua` counts them


def keys_of(tree_id: str) -> list[str]:
    return [f"penstock:{{{tree_id}}}:{name}" for name in _KEYS]


def _fields(now: Tree) -> dict[str, Any]:
    """`num_bytes` is for gateways that know of no version."""
    return {
        "tenant": now.tenant,
        "created_at": now.created_at,
        "is_listed": int(now.is_listed),
        "metadata": now.metadata,
        "is_pinned": int(now.is_pinned),
        "used_at": now.used_at,
        "head": now.head or "",
        "running": now.running or "",
        "num_turns": now.num_turns,
        "num_bytes": now.num_bytes,
    }


def _link_of(node: Node) -> str:
    parts = (node.order, node.parent or "", node.status, node.created_at, node.lease_ms)
    return "|".join(map(str, parts))


def writes_of(before: Tree | None, change: Change) -> list[Any]:
    """Arguments for `conversation.lua`: number of the key, name and value, each."""
    now = change.tree
    if now is None:
        return [_EVERYTHING, "", ""]
    known = {} if before is None else _fields(before)
    writes: list[Any] = []
    for name, value in _fields(now).items():
        if known.get(name) != value:
            writes += (_FIELDS, name, value)
    nodes = now.nodes if before is None else tree.changed_nodes(before, now)
    for turn_id, node in nodes.items():
        writes += (_LINKS, turn_id, _link_of(node))
    if change.body is not None:
        writes += (_BODIES, *change.body)
    for name_and_chunk in change.chunks.items():
        writes += (_CHUNKS, *name_and_chunk)
    for turn_id in change.dropped:
        writes += (-_LINKS, turn_id, "", -_BODIES, turn_id, "")
    for chunk in change.dropped_chunks:
        writes += (-_CHUNKS, chunk, "")
    return writes


def read_tree(
    conversation_id: str, fields: Sequence[bytes], links: Sequence[Any], chunks: Sequence[Any]
) -> Tree:
    """A tree from Redis. Gateways that know of no version leave some fields out."""
    known = dict(zip(fields[::2], fields[1::2], strict=True))
    created_at = int(known[b"created_at"])
    return Tree(
        conversation_id=conversation_id,
        tenant=known[b"tenant"].decode(),
        created_at=created_at,
        is_listed=known[b"is_listed"] == b"1",
        metadata=known[b"metadata"],
        is_pinned=known.get(b"is_pinned") == b"1",
        used_at=int(known.get(b"used_at", created_at)),
        head=known[b"head"].decode() or None,
        running=known[b"running"].decode() or None,
        num_turns=int(known[b"num_turns"]),
        nodes={
            turn_id.decode(): _node_of(link, num_bytes)
            for turn_id, link, num_bytes in zip(links[::3], links[1::3], links[2::3], strict=True)
        },
        chunks=dict(zip(chunks[::2], chunks[1::2], strict=True)),
    )


def _node_of(link: bytes, num_bytes: int) -> Node:
    order, parent, status, created_at, lease_ms = link.decode().split("|")
    return Node(
        parent=parent or None,
        status=cast("TurnStatus", status),
        created_at=int(created_at),
        order=int(order),
        num_bytes=num_bytes,
        lease_ms=int(lease_ms),
    )
