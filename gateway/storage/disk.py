"""A SQLite database that this process alone uses, on threads of its own.

    event loop → jobs → writer thread: one transaction for all jobs that wait → event loop
                      → reader thread: searches and lists, which hold up no write

A job is a function of a connection. Those that wait while a transaction runs are the next one, so
under load many jobs cost one commit, and alone a job waits for nothing. Each job is a savepoint: if
it fails, the others are stored nevertheless. A job's result is told after its commit.

WAL with `synchronous = NORMAL`: what was committed outlives the process at once. A loss of power
may cost the last moment, never consistency (https://sqlite.org/wal.html). Checkpoints run on the
reader thread, because they wait for the disk; the writer only does their last part.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")
Job = Callable[[sqlite3.Connection], _T]
Done = Callable[[Any, Exception | None], None]
_Reply = tuple[Done, Any, Exception | None]
_Queue = SimpleQueue[tuple[Job[Any], Done] | None]

FILE_NAME = "penstock.db"
_CHECKPOINT_BYTES = 32 << 20  # of the WAL, after which it is emptied, and writes wait some ms
_MAX_JOBS = 1024  # of a transaction
_COMPLAIN_EVERY_S = 60.0
_ERASE_EVERY_S = 1.0  # at most
_TROUBLE_S = 5.0  # after a write that failed
_BUSY_MS = 5000
_PRAGMAS = (
    "journal_mode = WAL",
    "synchronous = NORMAL",
    "secure_delete = ON",  # what is deleted is overwritten
    "wal_autocheckpoint = 0",
    "foreign_keys = ON",
    "temp_store = MEMORY",  # nothing of the database is written elsewhere
)
_FULL = (
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CANTOPEN,
)
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


class DiskError(Exception):
    """Nothing can be stored or read now; the text says why, as "the disk is full"."""


class NewerSchemaError(Exception):
    """The database was written by a later version of this server."""


class Disk:
    """The database `penstock.db` in a folder.

    Args:
        folder: exists and belongs to this process alone (`data_dir`).
        migrations: statements that lead from one version of the schema to the next, oldest first;
            `PRAGMA user_version` is how many of them were executed.
        on_emptied: called on the event loop when a damaged database was set aside and an empty one
            takes its place; what is in memory may be stored again.
    """

    def __init__(
        self,
        folder: Path,
        migrations: Sequence[str],
        *,
        on_emptied: Callable[[], None] = lambda: None,
    ) -> None:
        self.path = folder / FILE_NAME
        self._migrations = migrations
        self._on_emptied = on_emptied
        self._writes: _Queue = SimpleQueue()
        self._reads: _Queue = SimpleQueue()
        self._writer: sqlite3.Connection | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._threads: list[tuple[_Queue, threading.Thread]] = []  # in the order of their ends
        self._complain_s = 0.0
        self._trouble: tuple[str, str] = ("", "")
        self._trouble_until_s = 0.0
        self._wal = self.path.with_name(f"{FILE_NAME}-wal")
        self._is_checkpoint_due = False
        self._is_erasing_due = False
        self._eraser: asyncio.Task[None] | None = None

    # -- start and end -----------------------------------------------------------------------

    def open(self) -> None:
        """Open or create the database and bring its schema up to date. Blocks; called once, before
        `start`. A damaged database is set aside with a line in the log.

        Raises:
            DiskError: the folder cannot be written.
            NewerSchemaError.
        """
        with contextlib.suppress(FileNotFoundError):  # what a server that was killed had deleted
            self._is_erasing_due = self._wal.stat().st_size > 0
        try:
            self._writer = self._opened()
        except sqlite3.Error as error:
            if _code(error) not in _DAMAGED:
                raise DiskError(describe(error)) from error
            self._set_aside(error)
            self._writer = self._opened()

    def start(self) -> None:
        """Start the threads. Called on the event loop that gets the results."""
        self._loop = asyncio.get_running_loop()
        # The writer's connection is closed last, by itself: of two that close at once neither is
        # the last, whose closing empties and removes the WAL.
        for name, run, jobs in (
            ("reader", self._read, self._reads), ("writer", self._write, self._writes)
        ):  # fmt: skip
            thread = threading.Thread(target=run, name=f"disk {name}", daemon=True)
            thread.start()
            self._threads.append((jobs, thread))
        if self._is_erasing_due:
            self.erase_soon()

    async def close(self) -> None:
        """Execute the jobs that wait, and close the database."""
        if self._eraser is not None:  # closing the database does the same
            self._eraser.cancel()
        for jobs, thread in self._threads:
            jobs.put(None)
            await asyncio.to_thread(thread.join)

    # -- jobs --------------------------------------------------------------------------------

    def submit(self, job: Job[_T], done: Callable[[_T, Exception | None], None]) -> None:
        """Execute a job on the writer thread, in the order of submission.

        Args:
            done: called on the event loop after the commit, with the result and None, or with None
                and the job's exception or a `DiskError`.
        """
        self._writes.put((job, done))

    def submit_look(self, job: Job[_T], done: Callable[[_T, Exception | None], None]) -> None:
        """Execute a job that blocks or only reads, on the reader thread: it sees all commits
        before, and holds up none. `done` as of `submit`."""
        self._reads.put((job, done))

    async def run(self, job: Job[_T]) -> _T:
        """Execute a job that writes; returns its result after the commit.

        Raises:
            DiskError: nothing was stored.
            Exception: the job's.
        """
        return await self._awaited(self.submit, job)

    async def look(self, job: Job[_T]) -> _T:
        """As `submit_look`; returns and raises as `run`."""
        return await self._awaited(self.submit_look, job)

    def erase_soon(self) -> None:
        """Something was deleted: have it in no file any longer (`truncate`), in the background."""
        self._is_erasing_due = True
        if self._eraser is None or self._eraser.done():
            self._eraser = asyncio.create_task(self._erase(), name="erase what was deleted")

    async def erased(self) -> None:
        """Returns when what was deleted before is in no file any longer, or cannot be erased."""
        while self._eraser is not None and not self._eraser.done():
            await asyncio.wait({self._eraser})

    async def _erase(self) -> None:
        while self._is_erasing_due:
            self._is_erasing_due = False
            try:
                self._is_erasing_due = not await self.truncate() or self._is_erasing_due
            except DiskError as error:
                _LOG.warning("what was deleted cannot be erased from %s: %s", self.path, error)
            if self._is_erasing_due:
                await asyncio.sleep(_ERASE_EVERY_S)

    async def truncate(self) -> bool:
        """Write the WAL into the database and empty it, so that what was deleted is in no file any
        longer; False: it is being read, so try again later. Raises: DiskError."""
        await self.look(_checkpoint)  # most of it, while writes go on
        return await self.run(_reset)

    def sync(self) -> None:
        """Have what was committed outlive a loss of power. Blocks. Raises: OSError."""
        with contextlib.suppress(FileNotFoundError):  # nothing was since the database was opened
            fd = os.open(self._wal, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    async def _awaited(self, submit: Callable[[Job[_T], Done], None], job: Job[_T]) -> _T:
        future: asyncio.Future[_T] = asyncio.get_running_loop().create_future()

        def done(result: _T, error: Exception | None) -> None:
            if future.cancelled():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        submit(job, done)
        return await future

    # -- threads -----------------------------------------------------------------------------

    def _write(self) -> None:
        is_open = True
        while is_open:
            jobs, is_open = self._next_jobs()
            if jobs:
                replies = self._transaction([each for each in jobs if each[0] is not _reset])
                replies += [
                    (done, self._writer is not None and _reset(self._writer), None)
                    for job, done in jobs
                    if job is _reset
                ]
                self._tell(replies)
                self._checkpoint_if_due()
        if self._writer is not None:
            self._writer.close()

    def _next_jobs(self) -> tuple[list[tuple[Job[Any], Done]], bool]:
        """The jobs that wait, at least one; and whether there may be more later."""
        job = self._writes.get()
        jobs: list[tuple[Job[Any], Done]] = []
        while job is not None:
            jobs.append(job)
            if len(jobs) == _MAX_JOBS or self._writes.empty():
                return jobs, True
            job = self._writes.get()
        return jobs, False

    def _transaction(self, jobs: Sequence[tuple[Job[Any], Done]]) -> list[_Reply]:
        connection = self._writer
        if not jobs:
            return []
        try:
            if connection is None:  # the one before was damaged, and there was no room for another
                connection = self._writer = self._opened()
            connection.execute("BEGIN IMMEDIATE")
            replies = [(done, *_tried(connection, job)) for job, done in jobs]
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            if connection is not None:
                with contextlib.suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")
            refused = self._refused(error)
            return [(done, None, refused) for _, done in jobs]
        return replies

    @property
    def trouble(self) -> tuple[str, str] | None:
        """Why writes failed lately: a word, and a message; None: they did not."""
        return self._trouble if time.monotonic() < self._trouble_until_s else None

    def report(self, why: str, *, is_full: bool) -> DiskError:
        """Something could not be stored: `trouble` tells it for a while, the log once a minute."""
        now_s = time.monotonic()
        self._trouble, self._trouble_until_s = (
            ("full" if is_full else "failed", why),
            now_s + _TROUBLE_S,
        )
        if now_s >= self._complain_s:
            self._complain_s = now_s + _COMPLAIN_EVERY_S
            _LOG.warning("cannot store in %s: %s", self.path.parent, why)
        return DiskError(why)

    def _refused(self, error: sqlite3.Error) -> DiskError:
        """What to tell about a transaction that failed; replaces a damaged database."""
        if _code(error) in _DAMAGED:
            if self._writer is not None:
                self._writer.close()
                self._writer = None
            self._set_aside(error)  # with a line in the log
            self._complain_s = time.monotonic() + _COMPLAIN_EVERY_S
            with contextlib.suppress(sqlite3.Error):  # else the next transaction tries it
                self._writer = self._opened()
            self._call(self._on_emptied)
        return self.report(describe(error), is_full=_code(error) == sqlite3.SQLITE_FULL)

    def _read(self) -> None:
        connection: sqlite3.Connection | None = None
        while (each := self._reads.get()) is not None:
            job, done = each
            try:
                connection = connection or self._connected()
                reply: _Reply = (done, job(connection), None)
            except sqlite3.Error as error:
                if connection is not None:  # it may be of a database that was set aside
                    connection.close()
                    connection = None
                if _code(error) in _DAMAGED:  # the writer decides, and replaces it
                    self._call(partial(self.submit, _verify, _ignore))
                reply = (done, None, DiskError(describe(error)))
            except Exception as error:  # the job's, for whom it is
                reply = (done, None, error)
            self._tell([reply])
        if connection is not None:
            connection.close()

    def _checkpoint_if_due(self) -> None:
        """Have the reader thread write the WAL into the database when it has become large."""
        with contextlib.suppress(OSError):
            if not self._is_checkpoint_due and self._wal.stat().st_size > _CHECKPOINT_BYTES:
                self._is_checkpoint_due = True
                self._reads.put((_checkpoint, self._on_checkpoint))

    def _on_checkpoint(self, _result: None, _error: Exception | None) -> None:
        self._is_checkpoint_due = False
        # Of what was written meanwhile: otherwise it would grow as long as there is something.
        self.submit(_reset, _ignore)

    def _tell(self, replies: Sequence[_Reply]) -> None:
        self._call(partial(_deliver, replies))

    def _call(self, call: Callable[[], None]) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(call)

    # -- the file ----------------------------------------------------------------------------

    def _opened(self) -> sqlite3.Connection:
        """The writer's connection to a database of the latest schema."""
        connection = self._connected()
        try:
            self._migrate(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _migrate(self, connection: sqlite3.Connection) -> None:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version > len(self._migrations):
            raise NewerSchemaError(f"{self.path} was written by a later version of penstock")
        for number, statements in enumerate(self._migrations[version:], version + 1):
            connection.executescript(
                f"BEGIN IMMEDIATE; {statements}; PRAGMA user_version = {number}; COMMIT"
            )

    def _connected(self) -> sqlite3.Connection:
        with contextlib.suppress(FileExistsError):  # private from the beginning
            os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        connection = sqlite3.connect(
            self.path,
            timeout=_BUSY_MS / 1e3,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=256,
        )
        try:
            for pragma in _PRAGMAS:
                connection.execute(f"PRAGMA {pragma}")
        except sqlite3.Error:
            connection.close()
            raise
        return connection

    def _set_aside(self, error: sqlite3.Error) -> None:
        aside = self.path.with_name(f"{FILE_NAME}.damaged-{time.strftime('%Y%m%d-%H%M%S')}")
        self.path.replace(aside)
        for suffix in ("-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                Path(f"{self.path}{suffix}").replace(f"{aside}{suffix}")
        text = "%s is damaged (%s); it is now %s, and an empty one takes its place"
        _LOG.error(text, self.path, error, aside.name)


def describe(error: sqlite3.Error) -> str:
    """Why nothing can be stored, for messages."""
    code = _code(error)
    if code == sqlite3.SQLITE_FULL:
        return "the disk is full"
    if code in _DAMAGED:
        return "the database was damaged"
    return f"the database cannot be used ({error})"


def _code(error: sqlite3.Error) -> int:
    """The primary error code; -1: the error is not SQLite's but that of its caller."""
    return getattr(error, "sqlite_errorcode", -1) & 0xFF


def _tried(connection: sqlite3.Connection, job: Job[Any]) -> tuple[Any, Exception | None]:
    """A job's result, or the exception after which what it had changed is undone.

    Raises:
        sqlite3.Error: the whole transaction cannot go on.
    """
    connection.execute("SAVEPOINT job")
    try:
        result = job(connection)
    except Exception as error:
        if isinstance(error, sqlite3.Error) and _code(error) in (*_FULL, *_DAMAGED):
            raise
        connection.execute("ROLLBACK TO job")
        connection.execute("RELEASE job")
        return None, error
    connection.execute("RELEASE job")
    return result, None


def _verify(connection: sqlite3.Connection) -> None:
    """Raises: sqlite3.DatabaseError: the database is damaged."""
    (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        error = sqlite3.DatabaseError(found)
        error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
        raise error


def _checkpoint(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()


def _ignore(_: object, _error: Exception | None) -> None: ...


def _reset(connection: sqlite3.Connection) -> bool:
    """Write what is left of the WAL into the database, and empty it; False: it is being read. Not
    within a transaction."""
    connection.execute("PRAGMA busy_timeout = 0")
    try:
        (is_busy, _, _) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    except sqlite3.Error:
        return False  # the next transaction meets what is wrong
    finally:
        connection.execute(f"PRAGMA busy_timeout = {_BUSY_MS}")
    return not is_busy


def _deliver(replies: Sequence[_Reply]) -> None:
    for done, result, error in replies:
        done(result, error)
