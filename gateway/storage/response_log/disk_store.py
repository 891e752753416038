"""Response logs of one gateway, kept on this machine's disk.

    append ──► end of the iteration ──► one row, one transaction ──► commit ──► readers see it
                    ▲                              │
                    └── what came meanwhile ◄──────┘

A running log is in memory; the disk has its journal (`disk_journal`). The next process of this
folder takes over what ran. When the response ends, its whole log is stored, and the journal's rows
that no running response needs are deleted. A log that needs old ones, while most of the journal is
of others that have ended, is stored whole.

What the disk does not take is shown nevertheless: its log goes on unlogged, is no longer resumable,
and is stored whole, and resumable again, as soon as there is room.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

from penstock.gateway.storage.conversations.store import store_unavailable
from penstock.gateway.storage.disk import Disk, DiskError, Statement
from penstock.gateway.storage.response_log import replica as do
from penstock.gateway.storage.response_log.codec import encode_log
from penstock.gateway.storage.response_log.disk_journal import (
    Found,
    Write,
    checked,
    ended_log,
    forget,
    last_row,
    leave,
    next_epoch,
    recover,
    run,
    running_row,
    trim,
)
from penstock.gateway.storage.response_log.ended_logs import EndedLogs
from penstock.gateway.storage.response_log.log import (
    InMemory,
    ResponseLog,
    left_behind,
    response_expired,
)
from penstock.gateway.storage.response_log.log_store import DEFAULT_TTL_S, LogExistsError
from penstock.gateway.storage.response_log.record import EndEntry, LogHeader
from penstock.gateway.storage.response_log.replica import Commands
from penstock.gateway.storage.tenant_shares import TenantShares
from penstock.gateway.wake_ups import ENDS, WRITES

_LOG = logging.getLogger(__name__)
_RETRY_S = 1.0  # after the disk took nothing
_NUM_RETRIED = 8  # logs that a transaction stores whole, each of which may take milliseconds
_BEAT_S = 5.0  # in which the journal of running responses gets a row: so it tells when they ended
_NUM_DEAD = 50_000  # deltas of ended logs beyond which the journal is shortened
_TRIM_ROWS = 256  # that are deleted at a time


@dataclass(slots=True, eq=False)
class _Running:
    """A log that this process writes.

    Attributes:
        key: of its row.
        first_row: of the journal, from which on it is needed for this log.
        num_taken: its entries that are stored, or being stored.
        num_journaled: those of them that are in the journal.
        wants_whole: the next transaction stores it whole.
    """

    log: ResponseLog
    key: int
    first_row: int
    num_taken: int = 0
    num_journaled: int = 0
    wants_whole: bool = False

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
        disk: with the tables of `disk_journal.SCHEMA`; it must have started before this store. It
            calls `emptied`.
        max_bytes, ttl_s, shares: see `EndedLogs`.
        clock: seconds since the epoch.

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
    ) -> None:
        self.takeovers: asyncio.Queue[ResponseLog] = asyncio.Queue()
        self._disk = disk
        self._clock = clock
        self._pool: Callable[[], bytes] = bytes
        self._running: OrderedDict[str, _Running] = OrderedDict()  # by `first_row`
        self.running: Collection[str] = self._running.keys()
        self._opening: set[str] = set()
        # Shown without being stored: the disk may have less of them.
        self._unlogged: dict[_Running, None] = {}
        self._ended = EndedLogs(
            max_bytes, ttl_s=ttl_s, shares=shares, clock=clock, forget=self._forget
        )
        self._keys = itertools.count(1)
        self._next_row = 1
        self._rows: deque[tuple[int, int]] = deque()  # the journal's: number, how many deltas
        self._num_deltas = self._num_live = 0  # in the journal; those of running logs
        self._dirty: dict[_Running, None] = {}
        self._is_due = self._is_writing = self._is_leaving = False
        self._written: list[asyncio.Future[None]] = []  # who waits for the transaction
        self._has_dropped = False  # logs that are still in the files
        self._written_s = 0.0  # when the last transaction began
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
            found = await self._disk.run(partial(recover, storage=self))
        except DiskError as error:
            _LOG.warning("cannot go on with what ran before: %s", error)
            found = Found()
        self._rows.extend(found.rows)
        self._num_deltas = sum(num for _, num in found.rows)
        self._next_row = found.last_row + 1
        for response_id, tenant, ended_s, num_bytes in found.ended:
            self._ended.add(tenant, response_id, num_bytes, ended_s=ended_s)
        self._keys = itertools.count(max((*found.running, *found.unreadable), default=0) + 1)
        self._clean_up(found)
        first_row = found.rows[0][0] if found.rows else self._next_row
        for key, log in found.running.items():
            num = len(log.entries)
            self._running[log.header.response_id] = _Running(log, key, first_row, num, num)
            self._num_live += num
            log.do(log.replica.claimed(log.replica.epoch))
            self.takeovers.put_nowait(log)
        self._beat_later()

    def _clean_up(self, found: Found) -> None:
        for key in found.unreadable:
            self._disk.submit(leave(key), _ignore)
        if found.running:
            _LOG.info("%d responses ran when this server stopped", len(found.running))
            self._disk.submit(next_epoch(), _ignore)
        elif found.rows:
            self._disk.submit(trim(found.rows[-1][0]), _ignore)
            self._rows.clear()
            self._num_deltas = 0

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

    async def _flushed(self) -> None:
        while self._is_writing or self._dirty:
            await self._next_write()

    # -- logs --------------------------------------------------------------------------------

    async def create(self, header: LogHeader) -> ResponseLog:
        self._ended.drop_old()
        response_id = header.response_id
        if self._is_leaving:
            raise store_unavailable("this gateway is shutting down")
        if any(response_id in each for each in (self._opening, self._running, self._ended)):
            raise LogExistsError(response_id)
        each = _Running(ResponseLog(header, storage=self), next(self._keys), self._next_row)
        self._opening.add(response_id)
        try:
            await self._disk.run(run(running_row(each.key, self._pool(), each.log)))
        except DiskError as error:
            raise store_unavailable(str(error)) from error
        except BaseException:  # it may be stored nevertheless
            self._disk.submit(leave(each.key), _ignore)
            raise
        finally:
            self._opening.remove(response_id)
        each.first_row = self._next_row
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

    async def delete(self, tenant: str, response_id: str) -> None:
        await self._end_stored(response_id)
        if not self._ended.has(tenant, response_id):
            return
        try:
            row = await self._disk.look(partial(last_row, response_id=response_id))
            await self._disk.run(forget(response_id))
            if response_id in self._ended:
                self._ended.remove(response_id)
            await self._trim(row)
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
            self._store_again(each)
        while response_id in self._running:
            await self._next_write()
            if each in self._unlogged:
                raise store_unavailable("its log could not be stored either")

    async def _trim(self, row: int) -> None:
        """Delete the journal's rows up to this one; running logs that need them are stored whole.

        Raises:
            DiskError.
        """
        row = min(row, self._next_row - 1)
        while self._first_needed() <= row:
            each = next(iter(self._running.values()))
            if each in self._unlogged:
                return  # later
            each.wants_whole = True
            self._mark(each)
            await self._next_write()
        await self._disk.run(trim(row))

    def emptied(self) -> None:
        """The database was lost, and an empty one took its place: what runs is stored again."""
        self._ended.clear()
        self._rows.clear()
        self._num_deltas = self._num_live = 0
        for each in self._running.values():
            each.num_journaled = 0
            self._go_on_unlogged(each)
        self._retry_in(0.0)

    def _forget(self, response_id: str) -> None:
        self._disk.submit(forget(response_id), _ignore)
        self._has_dropped = True

    # -- writing -----------------------------------------------------------------------------

    def store(self, log: ResponseLog) -> None:
        self._mark(self._running[log.header.response_id])

    def carry_out(self, log: ResponseLog, commands: Commands) -> None:
        if commands & do.FOLLOW:
            self._running.pop(log.response_id, None)
            log.fail((left_behind if self._is_leaving else response_expired)(log.response_id))
        if commands & do.MEND:
            each = self._running[log.header.response_id]
            self._unlogged[each] = None
            self._dirty.pop(each, None)

    def _mark(self, each: _Running) -> None:
        self._dirty[each] = None
        if not (self._is_due or self._is_writing):
            self._is_due = True
            ENDS.add(self._write_dirty)

    def _write_dirty(self) -> None:
        """Store all that is new, unless a transaction runs: then, after it."""
        self._is_due = False
        if self._dirty and not self._is_writing:
            self._shorten_journal()
            batch, self._dirty = list(self._dirty), {}
            self._write(batch)

    def _write(self, batch: Sequence[_Running]) -> None:
        self._is_writing, self._written_s = True, asyncio.get_running_loop().time()
        write = Write(number=self._next_row, written_s=self._clock())
        self._next_row += 1
        ends = [(each, each.log.replica.epoch, len(each.log.entries)) for each in batch]
        done = partial(self._on_written, write, ends)
        try:
            self._plan(write, batch)
            job = write.job()
        except Exception as error:  # a bug
            done(None, error)
            return
        if isinstance(job, Statement):
            self._disk.submit_quick(job, done)
        else:
            self._disk.submit(job, done)

    def _plan(self, write: Write, batch: Sequence[_Running]) -> None:
        num_deltas = 0
        for each in batch:
            entries, begin = each.log.entries, each.num_taken
            each.num_taken = len(entries)
            if each.wants_whole or isinstance(entries[-1], EndEntry):
                self._plan_whole(write, each)
            elif begin < each.num_taken:
                new = entries[begin:]
                write.appended.append((each.key, new))
                each.num_journaled += len(new)
                num_deltas += len(new)
        self._rows.append((write.number, num_deltas))
        self._num_deltas += num_deltas
        self._num_live += num_deltas
        write.trim = self._next_trim()

    def _plan_whole(self, write: Write, each: _Running) -> None:
        log, header = each.log, each.log.header
        if each.has_end:
            data = checked(encode_log(header, log.entries))
            ended = header.response_id, header.tenant, write.written_s, write.number, data
            write.ended.append(ended)
            write.left.append((each.key,))
        else:
            write.running.append(running_row(each.key, self._pool(), log))
        # From now on it needs only later rows.
        self._num_live -= each.num_journaled
        each.num_journaled = 0
        each.wants_whole, each.first_row = False, self._next_row
        self._running.move_to_end(each.response_id)

    def _on_written(
        self,
        write: Write,
        ends: Sequence[tuple[_Running, int, int]],
        _result: None,
        error: Exception | None,
    ) -> None:
        self._is_writing = False
        if error is None:
            whole = {key for key, *_ in (*write.running, *write.left)}
            with WRITES:
                for each, epoch, num_entries in ends:
                    replica = each.log.replica
                    if each.key not in whole:
                        each.log.do(replica.acknowledged(epoch, num_entries))
                    elif each not in self._unlogged:
                        each.log.do(replica.stored_whole(epoch, num_entries))
            for response_id, tenant, _ended_s, _row, data in write.ended:
                self._ended.being_read[response_id] = self._running.pop(response_id).log
                self._ended.add(tenant, response_id, len(data))
            if self._unlogged and self._retry is None:
                self._retry_in(0.0)
        else:
            if not isinstance(error, DiskError):
                _LOG.error("storing responses failed", exc_info=error)
            for each, *_ in ends:
                self._go_on_unlogged(each)
            if self._retry is None:
                self._retry_in(_RETRY_S)
        written, self._written = self._written, []
        for waiting in written:
            if not waiting.done():
                waiting.set_result(None)
        self._write_dirty()

    async def _next_write(self) -> None:
        """Wait until a transaction has ended."""
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._written.append(waiting)
        await waiting

    # -- the journal -------------------------------------------------------------------------

    def _first_needed(self) -> int:
        """The first row that a running log needs."""
        return next((each.first_row for each in self._running.values()), self._next_row)

    def _next_trim(self) -> int:
        """Up to which row to delete now; 0: none."""
        first_needed = self._first_needed()
        if first_needed < self._next_row and self._rows[0][0] + _TRIM_ROWS > first_needed:
            return 0
        while self._rows and self._rows[0][0] < first_needed:
            self._num_deltas -= self._rows.popleft()[1]
        return first_needed - 1

    def _shorten_journal(self) -> None:
        """Have the log that needs the oldest rows stored whole, if most of the journal is dead."""
        if self._num_deltas > 2 * self._num_live + _NUM_DEAD:
            oldest = next(iter(self._running.values()))
            if oldest not in self._unlogged:
                oldest.wants_whole = True
                self._dirty[oldest] = None

    def _beat_later(self) -> None:
        self._beat = asyncio.get_running_loop().call_later(_BEAT_S, self._beat_now)

    def _beat_now(self) -> None:
        is_silent = asyncio.get_running_loop().time() - self._written_s >= _BEAT_S
        if self._running and is_silent and not self._is_writing:
            self._write(())
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
        for each in list(itertools.islice(self._unlogged, _NUM_RETRIED)):
            self._store_again(each)

    def _store_again(self, each: _Running) -> None:
        del self._unlogged[each]
        each.log.replica.retried(each.log.replica.epoch)
        each.wants_whole = True
        self._mark(each)


def _ignore(_: None, error: Exception | None) -> None:
    """What could not be deleted is found again at the next start."""
    if error is not None:
        _LOG.debug("cannot delete a log: %s", error)
