"""Conversations as rows of SQLite: functions of a connection, for jobs of `disk`.

Leases of running turns are not stored: `disk_store` has them in memory.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.gateway.storage.conversations import disk_texts, tree
from penstock.gateway.storage.conversations.records import StoredTurn
from penstock.gateway.storage.conversations.store import no_conversation
from penstock.gateway.storage.conversations.tree import Change, Node, Tree, Uses
from penstock.gateway.storage.conversations.turn_codec import chunk_names, unpack

SCHEMA = f"""
    CREATE TABLE tenants (
        id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE,
        num_dropped INTEGER NOT NULL DEFAULT 0, dropped_at INTEGER);
    CREATE TABLE conversations (
        id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, tenant INTEGER NOT NULL,
        created_at INTEGER NOT NULL, used_at INTEGER NOT NULL, is_listed INTEGER NOT NULL,
        is_pinned INTEGER NOT NULL, head TEXT, running TEXT, num_turns INTEGER NOT NULL,
        num_bytes INTEGER NOT NULL, last_use INTEGER NOT NULL, metadata BLOB NOT NULL);
    CREATE INDEX conversations_listed ON conversations (tenant, used_at, name) WHERE is_listed;
    CREATE INDEX conversations_pinned ON conversations (tenant, used_at, name)
        WHERE is_listed AND is_pinned;
    CREATE INDEX conversations_by_use ON conversations (last_use);
    CREATE TABLE turns (
        conversation INTEGER NOT NULL, name TEXT NOT NULL, position INTEGER NOT NULL, parent TEXT,
        status TEXT NOT NULL, created_at INTEGER NOT NULL, body BLOB NOT NULL);
    CREATE UNIQUE INDEX turns_of ON turns (conversation, name);
    CREATE TABLE chunks (conversation INTEGER NOT NULL, name BLOB NOT NULL, content BLOB NOT NULL);
    CREATE UNIQUE INDEX chunks_of ON chunks (conversation, name);
    {disk_texts.SCHEMA}
"""
_COLUMNS = """conversations.id, conversations.name, tenants.name, created_at, used_at, is_listed,
    is_pinned, head, running, num_turns, metadata"""
_FROM = "conversations JOIN tenants ON tenants.id = conversations.tenant"
# The searched text of a turn that is written: its id, and the text.
Text = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Row:
    """A conversation in the database: its number, its tenant's, and its tree."""

    number: int
    tenant: int
    tree: Tree


def load(
    connection: sqlite3.Connection,
    tenant: str,
    conversation_id: str,
    *,
    leases: Mapping[str, int],
) -> Row:
    """A conversation with its tree.

    Args:
        leases: until when turns run (ms).

    Raises:
        NotFoundError: there is none of this tenant.
    """
    found = connection.execute(
        f"SELECT {_COLUMNS}, conversations.tenant FROM {_FROM} WHERE conversations.name = ?",
        (conversation_id,),
    ).fetchone()
    if found is None or found[2] != tenant:
        raise no_conversation(conversation_id)
    number, *columns, tenant_of = found
    turns = connection.execute(
        "SELECT name, position, parent, status, created_at, length(body) FROM turns "
        "WHERE conversation = ?",
        (number,),
    )
    nodes = {
        name: Node(
            parent=parent,
            status=status,
            created_at=created_at,
            order=position,
            num_bytes=num_bytes,
            lease_ms=leases.get(name, 0),
        )
        for name, position, parent, status, created_at, num_bytes in turns
    }
    chunks = connection.execute(
        "SELECT name, length(content) FROM chunks WHERE conversation = ?", (number,)
    )
    return Row(number, tenant_of, _tree(columns, nodes, dict(chunks.fetchall())))


def listed(connection: sqlite3.Connection, number: int) -> Tree:
    """A conversation without its turns."""
    found = connection.execute(
        f"SELECT {_COLUMNS} FROM {_FROM} WHERE conversations.id = ?", (number,)
    ).fetchone()
    return _tree(found[1:], {}, {})


def page(
    connection: sqlite3.Connection,
    tenant: str,
    *,
    limit: int,
    after: str | None,
    newest_first: bool,
    pinned: bool | None,
) -> list[Tree]:
    """A tenant's listed conversations without their turns, as `ConversationStore.list_page`."""
    number = tenant_number(connection, tenant)
    conditions, values = ["conversations.tenant = ?", "is_listed"], list[Any]([number])
    if pinned is not None:
        conditions.append("is_pinned" if pinned else "NOT is_pinned")
    if after is not None:
        found = connection.execute(
            "SELECT used_at FROM conversations WHERE name = ? AND tenant = ? AND is_listed",
            (after, number),
        ).fetchone()
        if found is None:
            raise no_conversation(after, param="after")
        sign = "<" if newest_first else ">"
        conditions.append(f"(used_at, conversations.name) {sign} (?, ?)")
        values += [found[0], after]
    order = "DESC" if newest_first else "ASC"
    found = connection.execute(
        f"SELECT {_COLUMNS} FROM {_FROM} WHERE {' AND '.join(conditions)} "
        f"ORDER BY used_at {order}, conversations.name {order} LIMIT ?",
        (*values, limit),
    )
    return [_tree(row[1:], {}, {}) for row in found]


def _tree(columns: Sequence[Any], nodes: Mapping[str, Node], chunks: Mapping[bytes, int]) -> Tree:
    """
    Args:
        columns: `_COLUMNS` without the first.
    """
    (name, tenant, created_at, used_at, is_listed, is_pinned, head, running, num_turns,
     metadata) = columns  # fmt: skip
    return Tree(
        conversation_id=name,
        tenant=tenant,
        created_at=created_at,
        used_at=used_at,
        is_listed=bool(is_listed),
        is_pinned=bool(is_pinned),
        head=head,
        running=running,
        num_turns=num_turns,
        metadata=metadata,
        nodes=nodes,
        chunks=chunks,
    )


def tenant_number(connection: sqlite3.Connection, tenant: str) -> int | None:
    row = connection.execute("SELECT id FROM tenants WHERE name = ?", (tenant,)).fetchone()
    return None if row is None else int(row[0])


def insert(connection: sqlite3.Connection, *, made: Tree, last_use: int) -> None:
    """Store a new conversation, unless it is there."""
    connection.execute("INSERT OR IGNORE INTO tenants (name) VALUES (?)", (made.tenant,))
    tenant = tenant_number(connection, made.tenant)
    assert tenant is not None
    cursor = connection.execute(
        "INSERT OR IGNORE INTO conversations (name, tenant, created_at, used_at, is_listed, "
        "is_pinned, num_turns, num_bytes, last_use, metadata) "
        "VALUES (?, ?, ?, ?, ?, ?, 0, ?, ?, ?)",
        (
            made.conversation_id,
            tenant,
            made.created_at,
            made.used_at,
            made.is_listed,
            made.is_pinned,
            made.num_bytes,
            last_use,
            made.metadata,
        ),
    )
    if cursor.rowcount and made.is_listed and cursor.lastrowid is not None:
        title = made.conversation(0).title
        disk_texts.put(connection, cursor.lastrowid, disk_texts.TITLE, title, tenant=tenant)


def write(connection: sqlite3.Connection, row: Row, change: Change) -> None:
    """Write the rows that a change concerns."""
    before, now = row.tree, change.tree
    assert now is not None
    connection.execute(
        "UPDATE conversations SET used_at = ?, is_pinned = ?, head = ?, running = ?, "
        "num_turns = ?, num_bytes = ?, last_use = ?, metadata = ? WHERE id = ?",
        (
            now.used_at,
            now.is_pinned,
            now.head,
            now.running,
            now.num_turns,
            now.num_bytes,
            wall_us(),
            now.metadata,
            row.number,
        ),
    )
    written, body = change.body or ("", b"")
    for turn_id, node in tree.changed_nodes(before, now).items():
        values: tuple[object, ...] = (node.order, node.parent, node.status, node.created_at)
        if turn_id not in before.nodes:
            connection.execute(
                "INSERT INTO turns (conversation, name, position, parent, status, created_at, "
                "body) VALUES (?, ?, ?, ?, ?, ?, ?)",
                (row.number, turn_id, *values, body if turn_id == written else b""),
            )
        else:
            columns = "position = ?, parent = ?, status = ?, created_at = ?"
            if turn_id == written:
                columns, values = f"{columns}, body = ?", (*values, body)
            connection.execute(
                f"UPDATE turns SET {columns} WHERE conversation = ? AND name = ?",
                (*values, row.number, turn_id),
            )
    for turn_id in change.dropped:
        connection.execute(
            "DELETE FROM turns WHERE conversation = ? AND name = ?", (row.number, turn_id)
        )
    connection.executemany(
        "INSERT INTO chunks VALUES (?, ?, ?)",
        [(row.number, name, chunk) for name, chunk in change.chunks.items()],
    )
    connection.executemany(
        "DELETE FROM chunks WHERE conversation = ? AND name = ?",
        [(row.number, name) for name in change.dropped_chunks],
    )


def index(connection: sqlite3.Connection, row: Row, change: Change, text: Text | None) -> None:
    """Index the texts that a change concerns."""
    assert change.tree is not None
    before, now = row.tree.conversation(0).title, change.tree.conversation(0).title
    if before != now:
        disk_texts.put(connection, row.number, disk_texts.TITLE, now, tenant=row.tenant)
    if change.body is not None and text is not None:
        disk_texts.put(connection, row.number, *text, tenant=row.tenant)
    for turn_id in change.dropped:
        disk_texts.remove(connection, row.number, turn_id)


def delete(connection: sqlite3.Connection, number: int) -> None:
    disk_texts.remove(connection, number)
    for table in ("turns", "chunks"):
        connection.execute(f"DELETE FROM {table} WHERE conversation = ?", (number,))
    connection.execute("DELETE FROM conversations WHERE id = ?", (number,))


def drop(connection: sqlite3.Connection, *, conversation_id: str) -> None:
    """Delete a conversation to make room."""
    row = connection.execute(
        "SELECT id, tenant, is_listed FROM conversations WHERE name = ?", (conversation_id,)
    ).fetchone()
    if row is None:
        return
    number, tenant, is_listed = row
    delete(connection, number)
    if is_listed:
        connection.execute(
            "UPDATE tenants SET num_dropped = num_dropped + 1, dropped_at = ? WHERE id = ?",
            (int(time.time()), tenant),
        )


def content(
    connection: sqlite3.Connection, number: int, turn_ids: Sequence[str]
) -> tuple[list[bytes], dict[bytes, bytes]]:
    """The bodies of turns, and the chunks that they share."""
    bodies = []
    for turn_id in turn_ids:
        (body,) = connection.execute(
            "SELECT body FROM turns WHERE conversation = ? AND name = ?", (number, turn_id)
        ).fetchone()
        bodies.append(body)
    chunks = {}
    for name in {name for body in bodies for name in chunk_names(body)}:
        (chunks[name],) = connection.execute(
            "SELECT content FROM chunks WHERE conversation = ? AND name = ?", (number, name)
        ).fetchone()
    return bodies, chunks


def turn(connection: sqlite3.Connection, row: Row, turn_id: str) -> StoredTurn:
    """A turn as it is stored: one that runs is `in_progress`."""
    (body,), chunks = content(connection, row.number, [turn_id])
    return unpack(row.tree.info(turn_id, 0), body, chunks)


def uses(connection: sqlite3.Connection, number: int) -> Uses:
    found = connection.execute("SELECT name, body FROM turns WHERE conversation = ?", (number,))
    return {name: chunk_names(body) for name, body in found}


def all_by_use(connection: sqlite3.Connection) -> list[tuple[str, str, int]]:
    """Tenant, id and bytes of all conversations, used least recently first."""
    return connection.execute(
        f"SELECT tenants.name, conversations.name, num_bytes FROM {_FROM} ORDER BY last_use"
    ).fetchall()


def store_uses(connection: sqlite3.Connection, *, uses: Sequence[tuple[str, int]]) -> None:
    connection.executemany(
        "UPDATE conversations SET last_use = ? WHERE name = ?",
        [(last_use, conversation_id) for conversation_id, last_use in uses],
    )


def holdings(connection: sqlite3.Connection, *, tenant: str) -> tuple[int, int, int | None]:
    """Listed conversations, those dropped to make room, and when the last of them was."""
    row = connection.execute(
        "SELECT id, num_dropped, dropped_at FROM tenants WHERE name = ?", (tenant,)
    ).fetchone()
    if row is None:
        return 0, 0, None
    (num,) = connection.execute(
        "SELECT count(*) FROM conversations WHERE tenant = ? AND is_listed", (row[0],)
    ).fetchone()
    return num, row[1], row[2]


def wall_us() -> int:
    return time.time_ns() // 1000
