"""The index of conversations' text on disk: full-text search (FTS5) in small shards.

An index that is written in one piece keeps the words of a deleted text in its old segments until
these are merged, and SQLite before 3.42 has no other way to get rid of them: merging a large index
for each deletion would take minutes. So a document goes into the newest of many small indexes
(shards), which is full at `SHARD_CHARS`. After a deletion only the shards that had the text are
merged, in steps of a few milliseconds between other writes; an empty one is dropped. A search goes
through the shards from the newest to the oldest and ends when it has enough.

Functions of a connection, for jobs of `disk`.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.gateway.storage.conversations.texts import spaced, takes_prefix, unspaced

SCHEMA = """
    CREATE TABLE shards (
        id INTEGER PRIMARY KEY, num_chars INTEGER NOT NULL, num_documents INTEGER NOT NULL);
    CREATE TABLE documents (  -- in the order in which they were written
        id INTEGER PRIMARY KEY, conversation INTEGER NOT NULL, turn TEXT NOT NULL,
        shard INTEGER NOT NULL);
    CREATE INDEX documents_of ON documents (conversation, turn);
    CREATE TABLE unmerged (shard INTEGER PRIMARY KEY)  -- they have deleted words
"""
SHARD_CHARS = 4 << 20
TITLE = ""  # the turn of a document that is a title
_STEP_S = 0.003  # of merging, in which other writes wait
_MERGED_PAGES = 16
_TOKENIZE = "unicode61 remove_diacritics 2"


class DamagedIndexError(Exception):
    """The index of a shard is damaged, but not the texts in it."""

    def __init__(self, shard: int) -> None:
        super().__init__(f"the index of shard {shard} is damaged")
        self.shard = shard


@dataclass(frozen=True, slots=True)
class Document:
    conversation: int
    turn: str
    shard: int
    number: int


def put(
    connection: sqlite3.Connection, conversation: int, turn: str, text: str, *, tenant: int
) -> None:
    """Index the text of a turn, or a title, in place of an earlier one."""
    remove(connection, conversation, turn)
    if not text:
        return
    shard = _shard_for(connection, len(text))
    cursor = connection.execute(
        "INSERT INTO documents (conversation, turn, shard) VALUES (?, ?, ?)",
        (conversation, turn, shard),
    )
    _execute(
        connection,
        shard,
        f"INSERT INTO texts_{shard} (rowid, scope, text) VALUES (?, ?, ?)",
        (cursor.lastrowid, _scope(tenant), spaced(text)),
    )


def remove(connection: sqlite3.Connection, conversation: int, turn: str | None = None) -> None:
    """Remove the text of a turn, or with None of a whole conversation."""
    values: tuple[object, ...] = (conversation,)
    condition = "conversation = ?"
    if turn is not None:
        condition, values = "conversation = ? AND turn = ?", (conversation, turn)
    found = connection.execute(f"SELECT id, shard FROM documents WHERE {condition}", values)
    for number, shard in found.fetchall():
        _execute(connection, shard, f"DELETE FROM texts_{shard} WHERE rowid = ?", (number,))
        connection.execute("DELETE FROM documents WHERE id = ?", (number,))
        connection.execute(
            "UPDATE shards SET num_documents = num_documents - 1 WHERE id = ?", (shard,)
        )
        connection.execute("INSERT OR IGNORE INTO unmerged VALUES (?)", (shard,))


def search(
    connection: sqlite3.Connection, phrases: Sequence[Sequence[str]], *, tenant: int
) -> Iterator[Document]:
    """Documents that have all phrases, the newest first.

    Raises:
        DamagedIndexError: `rebuild` mends it.
    """
    words = " AND ".join(_matching(phrase) for phrase in phrases)
    query = f"scope:{_scope(tenant)} AND text:({words})"
    for (shard,) in connection.execute("SELECT id FROM shards ORDER BY id DESC").fetchall():
        try:
            yield from _matches(connection, shard, query)
        except sqlite3.DatabaseError as error:
            if _is_of_index(error):
                raise DamagedIndexError(shard) from error
            raise


def _matches(connection: sqlite3.Connection, shard: int, query: str) -> Iterator[Document]:
    for (number,) in connection.execute(
        f"SELECT rowid FROM texts_{shard} WHERE texts_{shard} MATCH ? ORDER BY rowid DESC",
        (query,),
    ):
        conversation, turn = connection.execute(
            "SELECT conversation, turn FROM documents WHERE id = ?", (number,)
        ).fetchone()
        yield Document(conversation, turn, shard, number)


def text_of(connection: sqlite3.Connection, document: Document) -> str:
    sql = f"SELECT text FROM texts_{document.shard} WHERE rowid = ?"
    ((text,),) = connection.execute(sql, (document.number,))
    return unspaced(text)


# -- merging -----------------------------------------------------------------------------------


def merge_step(connection: sqlite3.Connection) -> bool:
    """Merge shards from which something was deleted, for some milliseconds; whether there is more
    to do."""
    end_s = time.perf_counter() + _STEP_S
    while (shard := _next_to_merge(connection)) is not None:
        num_documents, is_last = connection.execute(
            "SELECT num_documents, id = (SELECT max(id) FROM shards) FROM shards WHERE id = ?",
            (shard,),
        ).fetchone()
        if not num_documents and not is_last:
            connection.execute(f"DROP TABLE texts_{shard}")
            connection.execute("DELETE FROM shards WHERE id = ?", (shard,))
        elif not _merge(connection, shard, until_s=end_s):
            return True
        connection.execute("DELETE FROM unmerged WHERE shard = ?", (shard,))
        if time.perf_counter() > end_s:
            return True
    return False


def _next_to_merge(connection: sqlite3.Connection) -> int | None:
    row = connection.execute("SELECT min(shard) FROM unmerged").fetchone()
    return None if row[0] is None else int(row[0])


def _merge(connection: sqlite3.Connection, shard: int, *, until_s: float) -> bool:
    """Merge all segments of a shard into one; whether that is done."""
    while True:
        before = connection.total_changes
        # A negative number also merges few segments: https://sqlite.org/fts5.html#the_merge_command
        _execute(
            connection,
            shard,
            f"INSERT INTO texts_{shard} (texts_{shard}, rank) VALUES ('merge', ?)",
            (-_MERGED_PAGES,),
        )
        if connection.total_changes - before < 2:
            return True
        if time.perf_counter() > until_s:
            return False


# -- damage ------------------------------------------------------------------------------------


def rebuild(connection: sqlite3.Connection, *, shard: int) -> None:
    """Make a shard's index again from its texts."""
    connection.execute(f"INSERT INTO texts_{shard} (texts_{shard}) VALUES ('rebuild')")


def _execute(
    connection: sqlite3.Connection, shard: int, statement: str, values: Sequence[object]
) -> None:
    """Execute a statement on a shard whose index may be damaged."""
    try:
        connection.execute(statement, values)
    except sqlite3.DatabaseError as error:
        if not _is_of_index(error):
            raise
        rebuild(connection, shard=shard)
        connection.execute(statement, values)


def _is_of_index(error: sqlite3.DatabaseError) -> bool:
    """Whether the full-text index is damaged, and not the database."""
    return getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_CORRUPT_VTAB


# -- parts -------------------------------------------------------------------------------------


def _scope(tenant: int) -> str:
    """A word that only documents of a tenant have."""
    return f"t{tenant}"


def _matching(phrase: Sequence[str]) -> str:
    quoted = '"' + " ".join(phrase).replace('"', '""') + '"'
    return f"{quoted}*" if takes_prefix(phrase[-1]) else quoted


def _shard_for(connection: sqlite3.Connection, num_chars: int) -> int:
    """The newest shard, or a new one if that is full; counts a document in it."""
    row = connection.execute("SELECT id, num_chars FROM shards ORDER BY id DESC LIMIT 1").fetchone()
    if row is None or row[1] >= SHARD_CHARS:
        shard = 1 if row is None else int(row[0]) + 1
        connection.execute("INSERT INTO shards VALUES (?, 0, 0)", (shard,))
        connection.execute(
            f"CREATE VIRTUAL TABLE texts_{shard} USING "
            f"fts5(scope, text, tokenize = '{_TOKENIZE}', columnsize = 0)"
        )
    else:
        shard = int(row[0])
    connection.execute(
        "UPDATE shards SET num_chars = num_chars + ?, num_documents = num_documents + 1 "
        "WHERE id = ?",
        (num_chars, shard),
    )
    return shard
