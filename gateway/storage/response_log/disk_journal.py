"""Response logs in the database on disk: the tables, what a transaction writes, what a start reads.

    log_running   a response that runs, with its log as it was when it was last stored whole;
                  what was appended since is in the journal (`journal_files`)
    log_ended     an ended response, with its whole log

Logs begin with their CRC, because SQLite does not notice when a byte of a value changes.

Databases of the first version had the journal in a table, `log_journal`, which counts as segment 0
of the journal: it is read, never written, and emptied when no running log needs it.
"""

from __future__ import annotations

import itertools
import logging
import sqlite3
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.gateway.storage.disk import Job
from penstock.gateway.storage.response_log.codec import UnreadableEntryError, encode_log
from penstock.gateway.storage.response_log.journal_files import Journal, content_of, read_content
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
JOURNAL_FILES = """
ALTER TABLE log_ended RENAME COLUMN last_row TO last_segment;
UPDATE log_ended SET last_segment = 0;
"""
_LOG = logging.getLogger(__name__)
_RUN = "INSERT OR REPLACE INTO log_running VALUES (?, ?, ?, ?)"
_END = "INSERT OR REPLACE INTO log_ended VALUES (?, ?, ?, ?, ?)"
_LEAVE = "DELETE FROM log_running WHERE key = ?"
_NEXT_EPOCH = "UPDATE log_running SET epoch = epoch + 1"
_FORGET = "DELETE FROM log_ended WHERE response_id = ?"
_CRC_BYTES = 4


@dataclass(slots=True, kw_only=True)
class Write:
    """What one transaction writes.

    Attributes:
        running: logs to be stored whole: key, epoch, pool, log.
        ended: of logs that have ended: the row in `log_ended`, with the journal's last segment that
            may have anything of it.
        left: keys of logs that no longer run.
    """

    running: list[tuple[int, int, bytes, bytes]] = field(default_factory=list)
    ended: list[tuple[str, str, float, int, bytes]] = field(default_factory=list)
    left: list[tuple[int]] = field(default_factory=list)

    def __call__(self, connection: sqlite3.Connection) -> None:
        connection.executemany(_RUN, self.running)
        connection.executemany(_END, self.ended)
        connection.executemany(_LEAVE, self.left)


def running_row(key: int, pool: bytes, log: ResponseLog) -> tuple[int, int, bytes, bytes]:
    """A row of `log_running`."""
    return key, log.epoch, pool, checked(encode_log(log.header, log.entries))


def run(row: tuple[int, int, bytes, bytes]) -> Job[None]:
    """Stores a log that begins."""
    return _statement(_RUN, *row)


def next_epoch() -> Job[None]:
    """Begins the next epoch of all that ran."""
    return _statement(_NEXT_EPOCH)


def leave(key: int) -> Job[None]:
    """Deletes a log that does not run."""
    return _statement(_LEAVE, key)


def forget(response_id: str) -> Job[None]:
    """Deletes an ended log."""
    return _statement(_FORGET, response_id)


def _statement(sql: str, *values: Any) -> Job[None]:
    def job(connection: sqlite3.Connection) -> None:
        connection.execute(sql, values)

    return job


def forget_old_journal(connection: sqlite3.Connection) -> None:
    """Deletes segment 0 of the journal."""
    connection.execute("DELETE FROM log_journal")


def last_segment(connection: sqlite3.Connection, response_id: str) -> int:
    """The journal's last one that may have anything of an ended log."""
    query = "SELECT last_segment FROM log_ended WHERE response_id = ?"
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
        segments: of the journal, which only the running need: the number of deltas in each.
        last_segment: of the journal, as far as any ended log was in it.
        ended: response, tenant, when, bytes; oldest first.
    """

    running: dict[int, ResponseLog] = field(default_factory=dict)
    unreadable: list[int] = field(default_factory=list)
    segments: dict[int, int] = field(default_factory=dict)
    last_segment: int = 0
    ended: list[tuple[str, str, float, int]] = field(default_factory=list)


def recover(connection: sqlite3.Connection, *, storage: Storage, journal: Journal) -> Found:
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
    old = list(_old_rows(connection))
    files = [(number, journal.rows(number)) for number in journal.existing()]
    found.segments, broken, last_s = _replayed([(0, old), *files] if old else files, logs)
    for key, log in logs.items():
        silent_s = max(0.0, time.time() - max(last_s, log.header.created_at))
        log.outage = Outage(pool=pools[key], silent_s=silent_s, is_complete=key not in broken)
        found.running[key] = log
    query = "SELECT response_id, tenant, ended_s, length(log) FROM log_ended ORDER BY ended_s"
    found.ended = connection.execute(query).fetchall()
    (last,) = connection.execute("SELECT max(last_segment) FROM log_ended").fetchone()
    found.last_segment = last or 0
    return found


def _old_rows(connection: sqlite3.Connection) -> Iterator[bytes | None]:
    """As `Journal.rows`, of segment 0."""
    query = "SELECT written_s, appended FROM log_journal ORDER BY number"
    for written_s, data in connection.execute(query):
        try:
            yield content_of(written_s, unchecked(data))
        except UnreadableEntryError:
            yield None


def _replayed(
    segments: Iterable[tuple[int, Iterable[bytes | None]]], logs: dict[int, ResponseLog]
) -> tuple[dict[int, int], set[int], float]:
    """Add to the logs what the journal has of them.

    Args:
        segments: numbers, and contents of rows.

    Returns: the number of deltas in each segment, the keys of the logs of which something is
    missing, and when the last row was written.
    """
    num_deltas, broken, last_s = dict[int, int](), set[int](), 0.0
    for number, rows in segments:
        num_deltas[number] = 0
        for content in rows:
            try:
                last_s, appended = read_content(content)
            except UnreadableEntryError as error:
                text = "a row in segment %d of the journal of responses is damaged: %s"
                _LOG.warning(text, number, error)
                broken |= logs.keys()
                continue
            for key, entries in appended:
                num_deltas[number] += len(entries)
                if key in logs and not _extended(logs[key], entries):
                    broken.add(key)
    return num_deltas, broken, last_s


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
