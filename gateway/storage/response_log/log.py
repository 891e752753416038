"""The log of a response while it grows, and its readers' cursors.

The owner appends entries. Readers see an entry once it is stored (at once in memory; with Redis,
after its acknowledgement). Every reader, live or replaying, on the owner's gateway or another, gets
the same entries from its own cursor. A slow reader gets several entries at a time and costs only
its position.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Protocol

from penstock.engine.chat_formats import Piece
from penstock.gateway.errors import RequestRefusedError
from penstock.gateway.storage.conversations.store import StoreUnavailableError
from penstock.gateway.storage.response_log.item_kinds import MESSAGE
from penstock.gateway.storage.response_log.record import DeltaEntry, EndEntry, Entry, LogHeader

FindAgain = Callable[[], Awaitable["ResponseLog"]]
_NUM_TRIES = 20  # to find a log again
_TRY_AGAIN_S = 0.25
_MAX_AT_ONCE = 32  # entries; bounds the memory of entries read but not yet sent to the client


class Storage(Protocol):
    """Stores a log's entries."""

    def appended(self, log: ResponseLog) -> None:
        """An entry was appended: store it, then call `log.publish`."""
        ...

    async def verify(self, log: ResponseLog, *, is_superseded: bool) -> None:
        """Call `log.fail` if the log has another owner.

        Args:
            is_superseded: the engine reported another owner.
        """
        ...

    async def is_read_elsewhere(self, log: ResponseLog) -> bool:
        """Whether another gateway follows the log for a reader."""
        ...


class InMemory:
    """Storage in this process: entries are visible at once, and there is no other owner."""

    def appended(self, log: ResponseLog) -> None:
        log.publish(len(log.entries))

    async def verify(self, log: ResponseLog, *, is_superseded: bool) -> None:
        pass

    async def is_read_elsewhere(self, log: ResponseLog) -> bool:  # noqa: ARG002  (there is none)
        return False


IN_MEMORY = InMemory()


class ResponseMovedError(RequestRefusedError):
    """503 `response_moved`: another gateway runs the response now; readers can resume it."""

    def __init__(self, response_id: str) -> None:
        super().__init__(
            f"another gateway has taken over {response_id!r}; resume the stream",
            code="response_moved",
            status=503,
        )


def left_behind(response_id: str) -> RequestRefusedError:
    """The error of a response whose gateway is stopping and does not look for the new owner."""
    return RequestRefusedError(
        f"this gateway is shutting down; resume {response_id!r} on a new connection",
        code="response_moved",
        status=503,
    )


@dataclass(frozen=True, slots=True)
class LogNotice:
    """An event for current readers only: it has no number and is neither stored nor replayed."""

    kind: str
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """What a store that was started again knows of a response that ran when it was stopped.

    Attributes:
        pool: the engines that computed it (`EnginePool.pool`).
        silent_s: since anything was last stored.
        is_complete: whether its log has all that readers may have seen.
    """

    pool: bytes
    silent_s: float
    is_complete: bool = True


class LogOwner(Protocol):
    """Runs a response and appends to its log."""

    def cancel(self) -> None:
        """Stop the response."""
        ...

    def lose(self) -> None:
        """Another gateway has taken the response over."""
        ...

    def readers_changed(self) -> None:
        """The number of readers has changed."""
        ...


class ResponseLog:
    """One response.

    Attributes:
        epoch: of the owner that appends.
        entries: in order; the first `num_published` are visible to readers.
        end: the last entry, once it is visible to readers.
        is_cancelled: a cancel arrived at this gateway.
        is_resumable: False once an entry was sent to a client without being stored.
        readers: open cursors.
        owner: runs the response in this gateway; None if none does, or not any longer.
        outage: after which it is to go on; None: none, or another gateway ran it.
    """

    def __init__(self, header: LogHeader, *, storage: Storage = IN_MEMORY) -> None:
        self.header = header
        self.epoch = 1
        self.entries: list[Entry] = []
        self.num_published = 0
        self.end: EndEntry | None = None
        self.is_cancelled = False
        self.is_resumable = True
        self.readers: set[LogReader] = set()
        self.owner: LogOwner | None = None
        self.outage: Outage | None = None
        self.notices: list[tuple[int, LogNotice]] = []  # with the number of entries before each
        self.failure: Exception | None = None
        self._storage = storage

    @property
    def next_number(self) -> int:
        """The sequence number of the next event."""
        if not self.entries:
            return self.header.num_opening_events
        return self.entries[-1].last_number + 1

    @property
    def is_ended(self) -> bool:
        return self.end is not None

    @property
    def deltas(self) -> list[DeltaEntry]:
        """The output so far."""
        return [entry for entry in self.entries if isinstance(entry, DeltaEntry)]

    @property
    def token_ids(self) -> list[int]:
        return token_ids_of(self.deltas)

    @property
    def parts(self) -> tuple[list[DeltaEntry], list[DeltaEntry]]:
        """The deltas of the summary that comes before the answer, and those of the answer."""
        deltas = self.deltas
        num = 0
        if self.header.compaction is not None:
            num = sum(not entry.output_index for entry in deltas)
        return deltas[:num], deltas[num:]

    @property
    def open_item(self) -> tuple[int, str] | None:
        """Output index and kind of the newest item; None before the first."""
        for entry in reversed(self.entries):
            if isinstance(entry, DeltaEntry):
                return entry.output_index, entry.kind
        return (0, MESSAGE.type) if self.header.begins_message else None

    # -- for the owner ----------------------------------------------------------------------

    def append_delta(
        self,
        text: str,
        token_ids: tuple[int, ...],
        logprobs: tuple[Mapping[str, Any], ...] = (),
        *,
        output_index: int = 0,
        kind: str = MESSAGE.type,
        name: str = "",
    ) -> None:
        """Append a delta of the newest item, or the first delta of the next one."""
        num_events = 1
        last = self.entries[-1] if self.entries else None
        if not (isinstance(last, DeltaEntry) and last.output_index == output_index):
            newest = self.open_item
            if newest is None or newest[0] != output_index:
                num_events += self.header.kind_of(kind).num_opening_events
                if newest is not None:
                    num_events += self.header.kind_of(newest[1]).num_closing_events
        number = self.next_number
        self.entries.append(
            DeltaEntry(number, text, token_ids, logprobs, output_index, kind, num_events, name)
        )
        self._storage.appended(self)

    def append(self, entry: Entry) -> None:
        """Append the next entry. Nothing follows an `EndEntry`."""
        assert entry.number == self.next_number
        self.entries.append(entry)
        self._storage.appended(self)

    async def verify(self, *, is_superseded: bool) -> bool:
        """Whether this gateway is still the owner; see `Storage.verify`."""
        await self._storage.verify(self, is_superseded=is_superseded)
        return self.failure is None

    async def is_read_elsewhere(self) -> bool:
        """Whether the log has readers beside those in `readers`."""
        return await self._storage.is_read_elsewhere(self)

    def notify(self, kind: str, **values: Any) -> None:
        """Send a notice to current readers, in order with the entries."""
        self.notices.append((len(self.entries), LogNotice(kind, values)))
        self._wake()

    def publish(self, num_entries: int) -> None:
        """Make the first `num_entries` visible to readers."""
        if num_entries > self.num_published:
            self.num_published = num_entries
            last = self.entries[num_entries - 1]
            self.end = last if isinstance(last, EndEntry) else None
        self._wake()

    def fail(self, error: Exception) -> None:
        """The log ends here: it has another owner, or its storage is gone. Readers get the visible
        entries, then this error."""
        self.failure = error
        self._wake()
        if self.owner is not None:
            self.owner.lose()

    # -- for everyone -----------------------------------------------------------------------

    def read(self, after: int = -1, *, find_again: FindAgain | None = None) -> LogReader:
        """A cursor after the event numbered `after`; use it as a context manager.

        Args:
            find_again: finds the new owner's log after a takeover.

        The opening events are not among the entries: a reader makes them from the header.
        """
        return LogReader(self, after, find_again)

    def cancel(self) -> None:
        """Stop the response if this gateway runs it and it has not ended."""
        if self.owner is not None and not self.is_ended:
            self.is_cancelled = True
            self.owner.cancel()

    def _wake(self) -> None:
        for reader in self.readers:
            reader.wake()


def pieces_of(deltas: Sequence[DeltaEntry]) -> list[Piece]:
    """Output in parts."""
    return [Piece(each.kind, each.text, each.num_events > 1, each.name) for each in deltas]


def token_ids_of(deltas: Sequence[DeltaEntry]) -> list[int]:
    return [token_id for entry in deltas for token_id in entry.token_ids]


class LogReader:
    """A cursor, and a `Source` of entries and notices.

    Attributes:
        log: the log that it reads; replaced when another gateway takes the response over.

    with log.read(after) as reader:
        while (entries := await next_of(reader)) is not None:
            ...
    """

    __slots__ = (
        "_after",
        "_find_again",
        "_may_lag",
        "_moving",
        "_next_notice",
        "_on_more",
        "_position",
        "log",
    )

    def __init__(self, log: ResponseLog, after: int, find_again: FindAgain | None) -> None:
        self._find_again = find_again
        self._on_more: Callable[[], None] | None = None
        self._moving: asyncio.Future[ResponseLog] | None = None  # to the next owner's log
        self._begin(log, after)

    def _begin(self, log: ResponseLog, after: int) -> None:
        self.log = log
        self._after = after
        self._position = _position(log, after)
        self._may_lag = after >= 0
        self._next_notice = len(log.notices)

    def __enter__(self) -> LogReader:
        self.log.readers.add(self)
        self._report()
        return self

    def __exit__(self, *_: object) -> None:
        self._on_more = None
        if self._moving is not None:
            self._moving.cancel()
            self._moving = None
        self.log.readers.discard(self)
        self._report()

    def _report(self) -> None:
        if self.log.owner is not None:
            self.log.owner.readers_changed()

    @property
    def is_over(self) -> bool:
        return self.log.end is not None and self._position == self.log.num_published

    def take(self) -> list[Entry | LogNotice]:
        """New entries and notices in order, up to a bound; may be empty.

        Raises:
            Exception: the error that `ResponseLog.fail` got, after all visible entries, unless the
                response's next owner is being looked for.
        """
        log, begin = self.log, self._position
        stop = min(log.num_published, begin + _MAX_AT_ONCE)
        found: list[Entry | LogNotice] = []
        while self._next_notice < len(log.notices):
            position, notice = log.notices[self._next_notice]
            if position > stop:
                break
            found += log.entries[begin:position]
            found.append(notice)
            begin = max(begin, position)
            self._next_notice += 1
        found += log.entries[begin:stop]
        self._position = stop
        if self._may_lag and found:
            self._drop_known(found)
        if log.failure is not None and log.end is None and not (found or self._is_behind):
            self._move_or_raise(log.failure)
        return found

    def _drop_known(self, found: list[Entry | LogNotice]) -> None:
        """A followed log may lag behind what its reader already got from the owner's gateway."""
        while found and not isinstance(found[0], LogNotice) and found[0].last_number <= self._after:
            del found[0]
        self._may_lag = not (found and not isinstance(found[0], LogNotice))

    def when_ready(self, call: Callable[[], None]) -> bool:
        """Have `call` called at once by the code that appends (`Source.when_ready`)."""
        log = self.log
        has_failed = log.failure is not None and not self._is_moving
        if self._is_behind or log.end is not None or has_failed:
            return False
        self._on_more = call
        return True

    @property
    def _is_behind(self) -> bool:
        log, next_notice = self.log, self._next_notice
        if self._position < log.num_published:
            return True
        return next_notice < len(log.notices) and log.notices[next_notice][0] <= self._position

    def wake(self) -> None:
        call, self._on_more = self._on_more, None
        if call is not None:
            call()

    # -- the response's next owner ----------------------------------------------------------

    @property
    def _is_moving(self) -> bool:
        return self._moving is not None and not self._moving.done()

    def _move_or_raise(self, failure: Exception) -> None:
        """Look for the log of the next owner; raise `failure` if there cannot be one."""
        if self._find_again is None or not isinstance(failure, ResponseMovedError):
            raise failure
        if self._moving is None:
            self._moving = asyncio.ensure_future(_found(self._find_again))
            self._moving.add_done_callback(self._on_found)
        elif self._moving.done():
            self._moving.result()  # it has failed

    def _on_found(self, moving: asyncio.Future[ResponseLog]) -> None:
        if moving is not self._moving:
            return  # the reader has left
        if moving.exception() is not None:
            self.wake()
            return
        self._moving = None
        wake, self._on_more = self._on_more, None
        read = self.log.entries[: self._position]
        after = max(self._after, read[-1].last_number) if read else self._after
        self.log.readers.discard(self)
        self._report()
        self._begin(moving.result(), after)
        self.log.readers.add(self)
        self._report()
        if wake is not None:
            wake()


async def _found(find_again: FindAgain) -> ResponseLog:
    """Find a log with retries: a gateway that has just lost its responses has many to find, and may
    have been stopped when its storage answered."""
    for _ in range(_NUM_TRIES - 1):
        try:
            return await find_again()
        except StoreUnavailableError:
            await asyncio.sleep(_TRY_AGAIN_S)
    return await find_again()


def _position(log: ResponseLog, after: int) -> int:
    """The first entry with an event numbered above `after`."""
    position = bisect_right(log.entries, after, key=attrgetter("last_number"))
    return min(position, log.num_published)
