"""Response logs in the database on disk: the tables, what a transaction writes, what a start reads.

    log_running   a response that runs, with its log as it was when it was last stored whole
    log_journal   what was appended to all logs since: a row for each transaction
    log_ended     an ended response, with its whole log

Logs and rows begin with their CRC, because SQLite does not notice when a byte of a value changes.
"""

from __future__ import annotations

import itertools
import logging
import sqlite3
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.gateway.storage.disk import Statement
from penstock.gateway.storage.response_log.codec import (
    UnreadableEntryError,
    decode_appended,
    encode_appended,
    encode_log,
)
from penstock.gateway.storage.response_log.log import Outage, ResponseLog, Storage
from penstock.gateway.storage.response_log.log_store import unpacked
from penstock.gateway.storage.response_log.record import Entry

SCHEMA = """
CREATE TABLE log_running (
    key INTEGER PRIMARY KEY,
    epoch INTEGER NOT NULL,
    pool BLOB NOT NULL,
    log BLOB NOT NULL
);
CREATE TABLE log_journal (
    number INTEGER PRIMARY KEY,
    written_s REAL NOT NULL,
    appended BLOB NOT NULL
);
CREATE TABLE log_ended (
    response_id TEXT PRIMARY KEY,
    tenant TEXT NOT NULL,
    ended_s REAL NOT NULL,
    last_row INTEGER NOT NULL,
    log BLOB NOT NULL
);
"""
_LOG = logging.getLogger(__name__)
_APPEND = "INSERT INTO log_journal VALUES (?, ?, ?)"
_RUN = "INSERT OR REPLACE INTO log_running VALUES (?, ?, ?, ?)"
_END = "INSERT OR REPLACE INTO log_ended VALUES (?, ?, ?, ?, ?)"
_LEAVE = "DELETE FROM log_running WHERE key = ?"
_TRIM = "DELETE FROM log_journal WHERE number <= ?"
_NEXT_EPOCH = "UPDATE log_running SET epoch = epoch + 1"
_FORGET = "DELETE FROM log_ended WHERE response_id = ?"
_CRC_BYTES = 4


@dataclass(slots=True, kw_only=True)
class Write:
    """What one transaction writes.

    Attributes:
        number: of its row in the journal; all rows before have lower ones.
        appended: deltas, with their log's key.
        running: logs to be stored whole: key, epoch, pool, log.
        ended: of logs that have ended: the row in `log_ended`.
        left: keys of logs that no longer run.
        trim: journal rows up to this one are no longer needed.
    """

    number: int
    written_s: float
    appended: list[tuple[int, Sequence[Entry]]] = field(default_factory=list)
    running: list[tuple[int, int, bytes, bytes]] = field(default_factory=list)
    ended: list[tuple[str, str, float, int, bytes]] = field(default_factory=list)
    left: list[tuple[int]] = field(default_factory=list)
    trim: int = 0

    def job(self) -> Statement | Write:
        """One statement, if that is all."""
        if self.running or self.left or self.trim:
            return self
        return Statement(_APPEND, self._row())

    def __call__(self, connection: sqlite3.Connection) -> None:
        if self.appended:
            connection.execute(_APPEND, self._row())
        connection.executemany(_RUN, self.running)
        connection.executemany(_END, self.ended)
        connection.executemany(_LEAVE, self.left)
        if self.trim:
            connection.execute(_TRIM, (self.trim,))

    def _row(self) -> tuple[int, float, bytes]:
        return self.number, self.written_s, checked(encode_appended(self.appended))


def running_row(key: int, pool: bytes, log: ResponseLog) -> tuple[int, int, bytes, bytes]:
    """A row of `log_running`."""
    return key, log.epoch, pool, checked(encode_log(log.header, log.entries))


def run(row: tuple[int, int, bytes, bytes]) -> Statement:
    """Stores a log that begins."""
    return Statement(_RUN, row)


def next_epoch() -> Statement:
    """Begins the next epoch of all that ran."""
    return Statement(_NEXT_EPOCH)


def leave(key: int) -> Statement:
    """Deletes a log that does not run."""
    return Statement(_LEAVE, (key,))


def forget(response_id: str) -> Statement:
    """Deletes an ended log."""
    return Statement(_FORGET, (response_id,))


def trim(number: int) -> Statement:
    """Deletes the journal's rows up to this one."""
    return Statement(_TRIM, (number,))


def last_row(connection: sqlite3.Connection, response_id: str) -> int:
    """The journal's last row that has something of an ended log."""
    query = "SELECT last_row FROM log_ended WHERE response_id = ?"
    found = connection.execute(query, (response_id,)).fetchone()
    return found[0] if found is not None else 0


def ended_log(connection: sqlite3.Connection, response_id: str) -> ResponseLog | None:
    """None: it is not there, or unreadable."""
    query = "SELECT log FROM log_ended WHERE response_id = ?"
    found = connection.execute(query, (response_id,)).fetchone()
    if found is None:
        return None
    try:
        return unpacked(unchecked(found[0]))
    except UnreadableEntryError as error:
        _LOG.warning("cannot read the log of %s: %s", response_id, error)
        return None


@dataclass(slots=True)
class Found:
    """What was there at a start.

    Attributes:
        running: logs by key, in the next epoch.
        unreadable: keys of those that cannot go on.
        rows: the journal's, of which only the running need any: number, how many deltas.
        ended: response, tenant, when, bytes; oldest first.
    """

    running: dict[int, ResponseLog] = field(default_factory=dict)
    unreadable: list[int] = field(default_factory=list)
    rows: list[tuple[int, int]] = field(default_factory=list)
    ended: list[tuple[str, str, float, int]] = field(default_factory=list)


def recover(connection: sqlite3.Connection, *, storage: Storage) -> Found:
    """Read what a process that has ended left behind."""
    found = Found()
    pools, logs = dict[int, bytes](), dict[int, ResponseLog]()
    for key, epoch, pool, data in connection.execute("SELECT * FROM log_running"):
        try:
            logs[key] = unpacked(unchecked(data), storage=storage)
        except UnreadableEntryError as error:
            _LOG.warning("a response that ran cannot be read, and does not go on: %s", error)
            found.unreadable.append(key)
        else:
            logs[key].epoch, pools[key] = epoch + 1, pool
    found.rows, broken, last_s = _replayed(connection, logs)
    for key, log in logs.items():
        silent_s = max(0.0, time.time() - max(last_s, log.header.created_at))
        log.outage = Outage(pool=pools[key], silent_s=silent_s, is_complete=key not in broken)
        found.running[key] = log
    query = "SELECT response_id, tenant, ended_s, length(log) FROM log_ended ORDER BY ended_s"
    found.ended = connection.execute(query).fetchall()
    return found


def _replayed(
    connection: sqlite3.Connection, logs: dict[int, ResponseLog]
) -> tuple[list[tuple[int, int]], set[int], float]:
    """Add to the logs what the journal has of them.

    Returns: the rows, the keys of the logs of which something is missing, and when the last row
    was written.
    """
    rows, broken, last_s = list[tuple[int, int]](), set[int](), 0.0
    query = "SELECT * FROM log_journal ORDER BY number"
    for number, last_s, data in connection.execute(query):  # noqa: B007  (the last one counts)
        num_deltas = 0
        try:
            for key, entries in decode_appended(unchecked(data)):
                num_deltas += len(entries)
                if key in logs and not _extended(logs[key], entries):
                    broken.add(key)
        except UnreadableEntryError as error:
            _LOG.warning("row %d of the journal of responses is damaged: %s", number, error)
            broken |= logs.keys()
        rows.append((number, num_deltas))
    return rows, broken, last_s


def _extended(log: ResponseLog, entries: Sequence[Entry]) -> bool:
    """Add those that it does not have; whether none is missing in between."""
    new = list(itertools.dropwhile(lambda entry: entry.number < log.next_number, entries))
    if new and new[0].number != log.next_number:
        return False
    log.entries += new
    log.publish(len(log.entries))
    return True


def checked(data: bytes) -> bytes:
    """With its CRC."""
    return zlib.crc32(data).to_bytes(_CRC_BYTES) + data


def unchecked(data: bytes) -> bytes:
    """Raises: UnreadableEntryError: it has changed."""
    content = data[_CRC_BYTES:]
    if zlib.crc32(content) != int.from_bytes(data[:_CRC_BYTES]):
        raise UnreadableEntryError("it has changed since it was written")
    return content
