"""Response logs of one gateway, kept on this machine's disk.

    append ──► end of the iteration ──► a row in the journal ──────────────► readers see it
                                    └─► ended: its whole log, a transaction ──────┘

A running log is in memory; the disk has its journal (`journal_files`), and the database its log as
it was when it was last stored whole (`disk_journal`). The next process of this folder takes over
what ran. When the response ends, its whole log is stored. Segments of the journal that no running
response needs are deleted. A log that needs old ones, while most of the journal is of others that
have ended, is stored whole.

The event loop appends the row itself: a thread and the way back cost several times what that takes.
It waits for the disk only if that is overloaded; after a row that took long, the next thousands go
to the database's writer thread, and what comes meanwhile is the next row.

A process that was frozen goes on as if nothing had been: no other can have its folder.

What the disk does not take is shown nevertheless: its log goes on unlogged, is no longer resumable,
and is stored whole, and resumable again, as soon as there is room.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import sqlite3
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

from penstock.gateway.storage.conversations.store import store_unavailable
from penstock.gateway.storage.disk import Disk, DiskError
from penstock.gateway.storage.response_log import replica as do
from penstock.gateway.storage.response_log.codec import encode_log
from penstock.gateway.storage.response_log.disk_journal import (
    Found,
    Write,
    checked,
    ended_log,
    forget,
    forget_old_journal,
    last_segment,
    leave,
    next_epoch,
    recover,
    run,
    running_row,
)
from penstock.gateway.storage.response_log.ended_logs import EndedLogs
from penstock.gateway.storage.response_log.journal_files import Journal, row_of
from penstock.gateway.storage.response_log.log import (
    InMemory,
    ResponseLog,
    left_behind,
    response_expired,
)
from penstock.gateway.storage.response_log.log_store import (
    DEFAULT_TTL_S,
    LogExistsError,
)
from penstock.gateway.storage.response_log.record import EndEntry, Entry, LogHeader
from penstock.gateway.storage.response_log.replica import Commands, Role
from penstock.gateway.storage.tenant_shares import TenantShares
from penstock.gateway.wake_ups import ENDS, WRITES

_LOG = logging.getLogger(__name__)
_RETRY_S = 1.0  # after the disk took nothing
_NUM_RETRIED = 8  # logs that a transaction stores whole, each of which may take milliseconds
_BEAT_S = 5.0  # in which the journal of running responses gets a row: so it tells when they ended
_NUM_DEAD = 50_000  # deltas of ended logs beyond which the journal is shortened
_SEGMENT_BYTES = 4 << 20  # of the journal; some 80,000 deltas
_SLOW_S = 0.002  # for which a row may hold up the event loop
_NUM_SLOW = 5000  # rows that are the writer thread's after one that took longer


@dataclass(slots=True, eq=False)
class _Running:
    """A log that this process writes.

    Attributes:
        key: of its row.
        first_segment: of the journal, from which on it is needed for this log.
        num_whole: its entries that were stored when it was last stored whole.
        num_taken: its entries that are stored.
        num_stores: transactions that are storing it whole now.
    """

    log: ResponseLog
    key: int
    first_segment: int
    num_whole: int = 0
    num_taken: int = 0
    num_stores: int = 0

    @property
    def response_id(self) -> str:
        return self.log.header.response_id

    @property
    def has_end(self) -> bool:
        entries = self.log.entries
        return bool(entries) and isinstance(entries[-1], EndEntry)


class DiskLogStore(InMemory):
    """A `LogStore`.

    Args:
        disk: with the tables of `disk_journal`; it must have started before this store. It calls
            `emptied`.
        max_bytes, ttl_s, shares: see `EndedLogs`.
        clock: seconds since the epoch.
        segment_bytes: of the journal.

    Attributes:
        running: ids of the responses that run.
    """

    def __init__(
        self,
        disk: Disk,
        max_bytes: int,
        *,
        ttl_s: float = DEFAULT_TTL_S,
        shares: TenantShares | None = None,
        clock: Callable[[], float] = time.time,
        segment_bytes: int = _SEGMENT_BYTES,
    ) -> None:
        self.takeovers: asyncio.Queue[ResponseLog] = asyncio.Queue()
        self._disk = disk
        self._journal = Journal(disk.path.parent, segment_bytes)
        self._clock = clock
        self._pool: Callable[[], bytes] = bytes
        self._running: dict[str, _Running] = {}
        self.running: Collection[str] = self._running.keys()
        self._opening: set[str] = set()
        # Shown without being stored: the disk may have less of them.
        self._unlogged: dict[_Running, None] = {}
        self._ended = EndedLogs(
            max_bytes, ttl_s=ttl_s, shares=shares, clock=clock, forget=self._forget
        )
        self._keys = itertools.count(1)
        self._dirty: dict[_Running, None] = {}
        self._is_due = self._is_appending = self._is_leaving = False
        self._num_storing = 0  # transactions
        self._num_slow = 0  # rows that are the writer thread's because they may take long
        self._written: list[asyncio.Future[None]] = []  # who waits for a row or a transaction
        self._has_dropped = False  # logs that are still in the files
        self._written_s = 0.0  # when the last row was
        self._beat: asyncio.TimerHandle | None = None
        self._retry: asyncio.TimerHandle | None = None

    # -- start and end -----------------------------------------------------------------------

    async def start(
        self,
        *,
        can_run: Callable[[], bool] = lambda: True,  # noqa: ARG002  (there is no other gateway)
        pool: Callable[[], bytes] = bytes,
    ) -> None:
        self._pool = pool
        try:
            found = await self._disk.run(partial(recover, storage=self, journal=self._journal))
        except DiskError as error:
            _LOG.warning("cannot go on with what ran before: %s", error)
            found = Found()
        self._journal.segments.update(found.segments)
        self._journal.number = max((found.last_segment, *self._journal.existing())) + 1
        for response_id, tenant, ended_s, num_bytes in found.ended:
            self._ended.add(tenant, response_id, num_bytes, ended_s=ended_s)
        # A key is never used again: the journal may have more of an earlier log.
        self._keys = itertools.count(max((time.time_ns(), *found.running, *found.unreadable)) + 1)
        for key in found.unreadable:
            self._disk.submit(leave(key), _ignore)
        if found.running:
            _LOG.info("%d responses ran when this server stopped", len(found.running))
            self._disk.submit(next_epoch(), _ignore)
        first_segment = min(found.segments, default=self._journal.number)
        for key, log in found.running.items():
            self._running[log.header.response_id] = _Running(
                log, key, first_segment, num_taken=len(log.entries)
            )
            log.do(log.replica.claimed(log.replica.epoch))
            self.takeovers.put_nowait(log)
        self._drop_dead()
        self._beat_later()

    async def hand_over(self) -> None:
        """What runs goes on when the server starts again. An unlogged log is not left: it would go
        on from where the disk has it."""
        self._is_leaving = True
        await self._flushed()
        for each in [each for each in self._running.values() if each not in self._unlogged]:
            each.log.do(each.log.replica.fenced(each.log.replica.epoch))

    async def let_readers_end(self, limit_s: float) -> None:
        """There is no other gateway that runs anything."""

    async def close(self) -> None:
        self._is_leaving = True
        for timer in (self._beat, self._retry):
            if timer is not None:
                timer.cancel()
        await self._flushed()
        self._journal.close()

    async def _flushed(self) -> None:
        while self._dirty or self._is_appending or self._num_storing:
            await self._next_write()

    # -- logs --------------------------------------------------------------------------------

    async def create(self, header: LogHeader) -> ResponseLog:
        self._ended.drop_old()
        response_id = header.response_id
        if self._is_leaving:
            raise store_unavailable("this gateway is shutting down")
        if any(response_id in each for each in (self._opening, self._running, self._ended)):
            raise LogExistsError(response_id)
        each = _Running(ResponseLog(header, storage=self), next(self._keys), self._journal.number)
        self._opening.add(response_id)
        try:
            await self._disk.run(run(self._row_of(each)))
        except DiskError as error:
            raise store_unavailable(str(error)) from error
        except BaseException:  # it may be stored nevertheless
            self._disk.submit(leave(each.key), _ignore)
            raise
        finally:
            self._opening.remove(response_id)
        each.first_segment = self._journal.number
        self._running[response_id] = each
        return each.log

    async def find(self, tenant: str, response_id: str) -> ResponseLog:
        self._ended.drop_old()
        running = self._running.get(response_id)
        if running is not None and running.log.header.tenant == tenant:
            return running.log
        if self._ended.has(tenant, response_id):
            return await self._read(response_id)
        if self._is_leaving:
            raise left_behind(response_id)
        raise response_expired(response_id)

    async def _read(self, response_id: str) -> ResponseLog:
        """The decoded log, shared by all of its current readers."""
        being_read = self._ended.being_read
        if (known := being_read.get(response_id)) is not None:
            return known
        try:
            log = await self._disk.look(partial(ended_log, response_id=response_id))
        except DiskError as error:
            raise store_unavailable(str(error)) from error
        if log is None or response_id not in self._ended:
            raise response_expired(response_id)
        return being_read.setdefault(response_id, log)

    async def cancel(self, tenant: str, response_id: str) -> None:
        (await self.find(tenant, response_id)).cancel()

    async def steer(self, tenant: str, response_id: str, steer_id: str, text: str) -> None:
        (await self.find(tenant, response_id)).steer(steer_id, text)

    async def delete(self, tenant: str, response_id: str) -> None:
        await self._end_stored(response_id)
        if not self._ended.has(tenant, response_id):
            return
        try:
            segment = await self._disk.look(partial(last_segment, response_id=response_id))
            await self._disk.run(forget(response_id))
            if response_id in self._ended:
                self._ended.remove(response_id)
            await self._trim(segment)
            self._disk.erase_soon()
        except DiskError as error:
            raise store_unavailable(str(error)) from error

    async def _end_stored(self, response_id: str) -> None:
        """If a response has ended, wait until that is stored.

        Raises:
            StoreUnavailableError: it cannot be.
        """
        each = self._running.get(response_id)
        if each is None or not each.has_end:
            return
        if each in self._unlogged:
            self._store_again([each])
        while response_id in self._running:
            await self._next_write()
            if each in self._unlogged:
                raise store_unavailable("its log could not be stored either")

    async def _trim(self, segment: int) -> None:
        """Delete the journal's segments up to this one; running logs that need them are stored
        whole.

        Raises:
            DiskError.
        """
        while self._is_appending:
            await self._next_write()
        if segment == self._journal.number:
            self._journal.begin_next()
        segment = min(segment, self._journal.number - 1)
        while (oldest := self._oldest()) is not None and oldest.first_segment <= segment:
            if oldest in self._unlogged:
                self._has_dropped = True
                return  # later
            if not oldest.num_stores:
                self._store([oldest])
            await self._next_write()
        if self._is_leaving:
            return  # what was handed over needs them
        dead = self._journal.take_before(segment + 1)
        try:
            await self._disk.look(partial(self._remove, dead))
        except DiskError:
            self._journal.segments.update(dead)
            raise

    def emptied(self) -> None:
        """The database was lost, and an empty one took its place: what runs is stored again."""
        self._ended.clear()
        for each in self._running.values():
            self._go_on_unlogged(each)
        self._retry_in(0.0)

    def _forget(self, response_id: str) -> None:
        self._disk.submit(forget(response_id), _ignore)
        self._has_dropped = True

    # -- writing -----------------------------------------------------------------------------

    def store(self, log: ResponseLog) -> None:
        if log.replica.role is not Role.VERIFYING:  # otherwise it is first stored whole
            self._mark(self._running[log.response_id])

    def carry_out(self, log: ResponseLog, commands: Commands) -> None:
        if commands & do.FOLLOW:
            self._running.pop(log.response_id, None)
            log.fail((left_behind if self._is_leaving else response_expired)(log.response_id))
        if commands & do.MEND:
            each = self._running[log.response_id]
            self._unlogged[each] = None
            self._dirty.pop(each, None)

    def _mark(self, each: _Running) -> None:
        self._dirty[each] = None
        if not (self._is_due or self._is_appending):
            self._is_due = True
            ENDS.add(self._write_dirty)

    def _write_dirty(self) -> None:
        """Store all that is new, unless a row is being written: then, after it."""
        self._is_due = False
        if not self._dirty or self._is_appending:
            return
        batch, self._dirty = self._dirty, {}
        appended = list[tuple[int, Sequence[Entry]]]()
        running, ended = list[tuple[_Running, int]](), list[_Running]()
        for each in batch:
            if each.has_end:
                ended.append(each)
                continue
            entries = each.log.entries
            running.append((each, num := len(entries)))
            if num > each.num_taken:
                appended.append((each.key, entries[each.num_taken :]))
        if appended:
            self._append(appended, running)
        elif running:
            self._on_appended(running, None, None)
        if ended:
            self._store(ended)

    def _append(
        self,
        appended: Sequence[tuple[int, Sequence[Entry]]],
        running: Sequence[tuple[_Running, int]],
    ) -> None:
        """Write a row.

        Args:
            running: logs, with the number of entries of which all are stored then.
        """
        journal = self._journal
        if journal.is_full:
            journal.begin_next()
            self._drop_dead()
        num_deltas = sum(len(entries) for _, entries in appended)
        journal.segments[journal.number] = journal.segments.get(journal.number, 0) + num_deltas
        self._written_s = asyncio.get_running_loop().time()
        error: Exception | None = None
        try:
            row = row_of(self._clock(), appended)
            if self._num_slow:
                self._num_slow -= 1
                self._is_appending = True
                done = partial(self._on_appended, running)
                self._disk.submit(lambda _: journal.append(row), done)
                return
            begun_s = time.perf_counter()
            journal.append(row)
            if time.perf_counter() - begun_s > _SLOW_S:
                self._num_slow = _NUM_SLOW
        except Exception as caught:
            error = caught
        self._on_appended(running, None, error)

    def _on_appended(
        self, running: Sequence[tuple[_Running, int]], _: None, error: Exception | None
    ) -> None:
        self._is_appending = False
        if error is None:
            with WRITES:
                for each, num in running:
                    each.num_taken = max(each.num_taken, num)
                    replica = each.log.replica
                    each.log.do(replica.acknowledged(replica.epoch, num))
        else:
            self._refused([each for each, _num in running], error)
        self._tell_written()

    def _store(self, batch: Sequence[_Running]) -> None:
        """Store logs whole, in a transaction."""
        write, planned = Write(), list[tuple[_Running, int, int]]()
        try:
            for each in batch:
                planned.append((each, len(each.log.entries), self._journal.number))
                self._plan(write, each)
        except Exception as error:  # a bug
            self._refused(batch, error)
            return
        for each in batch:
            each.num_stores += 1
        self._num_storing += 1
        self._disk.submit(write, partial(self._on_stored, write, planned))

    def _plan(self, write: Write, each: _Running) -> None:
        log, header = each.log, each.log.header
        if each.has_end:
            data = checked(encode_log(header, log.entries))
            last = self._journal.number
            write.ended.append((header.response_id, header.tenant, self._clock(), last, data))
            write.left.append((each.key,))
        else:
            write.running.append(self._row_of(each))

    def _row_of(self, each: _Running) -> tuple[int, int, bytes, bytes]:
        """With the engines that compute it, or, while none is known, those that did."""
        before = b"" if each.log.outage is None else each.log.outage.pool
        return running_row(each.key, self._pool() or before, each.log)

    def _on_stored(
        self,
        write: Write,
        planned: Sequence[tuple[_Running, int, int]],
        _: None,
        error: Exception | None,
    ) -> None:
        self._num_storing -= 1
        for each, _num, _segment in planned:
            each.num_stores -= 1
        if error is None:
            with WRITES:
                for each, num, segment in planned:
                    self._stored(each, num, segment)
            for response_id, tenant, _ended_s, _last, data in write.ended:
                self._ended.being_read[response_id] = self._running.pop(response_id).log
                self._ended.add(tenant, response_id, len(data))
            if write.running:
                self._drop_dead()
            if self._unlogged and self._retry is None:
                self._retry_in(0.0)
        else:
            self._refused([each for each, _num, _segment in planned], error)
        self._tell_written()

    def _stored(self, each: _Running, num_entries: int, segment: int) -> None:
        """A log was stored whole, so that it only needs this segment and later ones."""
        each.first_segment, each.num_whole = segment, num_entries
        each.num_taken = max(each.num_taken, num_entries)
        if each not in self._unlogged:
            replica = each.log.replica
            was_left = replica.role is Role.VERIFYING  # so that `store` did nothing
            commands = replica.stored_whole(replica.epoch, num_entries)
            each.log.do(commands | replica.pending if was_left else commands)

    def _refused(self, batch: Sequence[_Running], error: Exception) -> None:
        """They could not be stored."""
        if isinstance(error, OSError):
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            why = "the disk is full" if is_full else f"the journal cannot be written ({error})"
            self._disk.report(why, is_full=is_full)
        elif not isinstance(error, DiskError):
            _LOG.error("storing responses failed", exc_info=error)
        for each in batch:
            self._go_on_unlogged(each)
        if self._unlogged and self._retry is None:
            self._retry_in(_RETRY_S)

    def _tell_written(self) -> None:
        written, self._written = self._written, []
        for waiting in written:
            if not waiting.done():
                waiting.set_result(None)
        self._write_dirty()

    async def _next_write(self) -> None:
        """Wait until a row or a transaction was written."""
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._written.append(waiting)
        await waiting

    # -- the journal -------------------------------------------------------------------------

    def _oldest(self) -> _Running | None:
        """The running log that needs the oldest segment."""
        return min(self._running.values(), key=attrgetter("first_segment"), default=None)

    def _drop_dead(self) -> None:
        """Delete the segments that no running log needs. If most of the others is dead too, have
        the log that needs the oldest stored whole."""
        if self._is_leaving:
            return
        journal, oldest = self._journal, self._oldest()
        dead = journal.take_before(journal.number if oldest is None else oldest.first_segment)
        if dead:
            self._disk.submit_look(partial(self._remove, dead), partial(self._on_removed, dead))
        num_live = sum(each.num_taken - each.num_whole for each in self._running.values())
        if sum(journal.segments.values()) <= 2 * num_live + _NUM_DEAD:
            return
        if (
            oldest is not None
            and oldest.first_segment < journal.number
            and not (oldest.num_stores or oldest in self._unlogged)
        ):
            self._store([oldest])

    def _remove(self, segments: Collection[int], connection: sqlite3.Connection) -> None:
        """Delete segments. Raises: DiskError, sqlite3.Error."""
        if 0 in segments:
            forget_old_journal(connection)
        try:
            self._disk.sync()  # what made them needless
            self._journal.remove(segments)
        except OSError as error:
            raise DiskError(f"the journal cannot be deleted ({error})") from error

    def _on_removed(self, segments: dict[int, int], _: None, error: Exception | None) -> None:
        if error is not None:
            self._journal.segments.update(segments)
            _ignore(None, error)

    def _beat_later(self) -> None:
        self._beat = asyncio.get_running_loop().call_later(_BEAT_S, self._beat_now)

    def _beat_now(self) -> None:
        is_silent = asyncio.get_running_loop().time() - self._written_s >= _BEAT_S
        if self._running and is_silent and not self._is_appending:
            self._append((), ())
        if not self._is_appending:
            if self._has_dropped or not self._running:
                self._journal.begin_next()
            self._drop_dead()
        if self._has_dropped:
            self._has_dropped = False
            self._disk.erase_soon()
        self._beat_later()

    # -- what the disk did not take ----------------------------------------------------------

    def _go_on_unlogged(self, each: _Running) -> None:
        self._unlogged[each] = None  # also if it has ended
        each.log.do(each.log.replica.give_up(each.log.replica.epoch))

    def _retry_in(self, delay_s: float) -> None:
        if self._retry is not None:
            self._retry.cancel()
        self._retry = asyncio.get_running_loop().call_later(delay_s, self._store_unlogged)

    def _store_unlogged(self) -> None:
        self._retry = None
        waiting = (each for each in self._unlogged if not each.num_stores)
        if batch := list(itertools.islice(waiting, _NUM_RETRIED)):
            self._store_again(batch)

    def _store_again(self, batch: Sequence[_Running]) -> None:
        for each in batch:
            del self._unlogged[each]
            each.log.replica.retried(each.log.replica.epoch)
        self._store(batch)


def _ignore(_: None, error: Exception | None) -> None:
    """What could not be deleted is found again at the next start."""
    if error is not None:
        _LOG.debug("cannot delete a log: %s", error)
