"""A response's entries while it grows, and the cursors of those who read them.

The owner appends; an entry is seen once its storage has it (at once in memory, after Redis'
acknowledgement otherwise). Every reader, live or replaying, on the owner's gateway or another,
gets the same entries from a cursor of its own: a slow one gets several at a time, and costs
nothing but its place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from penstock.gateway.errors import RequestRefusedError
from penstock.gateway.storage.conversations.store import StoreUnavailableError
from penstock.gateway.storage.response_log.record import DeltaEntry, EndEntry, Entry, ResponseHeader

FindAgain = Callable[[], Awaitable["ResponseLog"]]
_NUM_TRIES = 20  # to find a log again
_TRY_AGAIN_S = 0.25
_MAX_AT_ONCE = 32  # entries: what a reader has taken, and its client has not, is memory


class Storage(Protocol):
    """Where a log's entries are kept."""

    def appended(self, log: ResponseLog) -> None:
        """An entry was added: see to it that `log.publish` is called once it is safe."""
        ...

    async def verify(self, log: ResponseLog, *, is_superseded: bool) -> None:
        """Have `log.fail` called now if another owner has it.

        Args:
            is_superseded: the engine says so.
        """
        ...

    async def is_read_elsewhere(self, log: ResponseLog) -> bool:
        """Whether another gateway follows it for somebody."""
        ...


class InMemory:
    """Storage that is this process: what is appended is seen, and nobody else owns it."""

    def appended(self, log: ResponseLog) -> None:
        log.publish(len(log.entries))

    async def verify(self, log: ResponseLog, *, is_superseded: bool) -> None:
        pass

    async def is_read_elsewhere(self, log: ResponseLog) -> bool:  # noqa: ARG002  (there is none)
        return False


IN_MEMORY = InMemory()


class ResponseMovedError(RequestRefusedError):
    """503 `response_moved`: another gateway runs the response now; a reader resumes it there."""

    def __init__(self, response_id: str) -> None:
        super().__init__(
            f"another gateway carries {response_id!r} on; resume it",
            code="response_moved",
            status=503,
        )


@dataclass(frozen=True, slots=True)
class LogNotice:
    """Something to tell who listens now: it has no number, is not stored, and not replayed."""

    kind: str
    values: Mapping[str, Any] = field(default_factory=dict)


class ResponseLog:
    """One response.

    Attributes:
        epoch: of the owner that appends.
        entries: in order; the first `num_published` may be seen.
        is_cancelled: somebody here wanted it to stop.
        is_resumable: False once an entry left for a client that storage did not confirm.
        readers: cursors open now.
        on_readers: told when their number changes; like the next two the owner's, while it runs.
        on_cancel: somebody wants it to stop.
        on_lost: another gateway runs it now.
    """

    def __init__(self, header: ResponseHeader, *, storage: Storage = IN_MEMORY) -> None:
        self.header = header
        self.epoch = 1
        self.entries: list[Entry] = []
        self.num_published = 0
        self.is_cancelled = False
        self.is_resumable = True
        self.readers: set[LogReader] = set()
        self.on_readers: Callable[[], None] | None = None
        self.on_cancel: Callable[[], None] | None = None
        self.on_lost: Callable[[], None] | None = None
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
    def end(self) -> EndEntry | None:
        """The last entry, once readers can see it."""
        last = self.entries[self.num_published - 1] if self.num_published else None
        return last if isinstance(last, EndEntry) else None

    @property
    def is_ended(self) -> bool:
        return self.end is not None

    @property
    def text(self) -> str:
        return "".join(entry.text for entry in self.entries if isinstance(entry, DeltaEntry))

    @property
    def token_ids(self) -> list[int]:
        return [
            token_id
            for entry in self.entries
            if isinstance(entry, DeltaEntry)
            for token_id in entry.token_ids
        ]

    # -- the owner's ------------------------------------------------------------------------

    def append(self, entry: Entry) -> None:
        """The next entry. Nothing follows an `EndEntry`."""
        assert entry.number == self.next_number
        self.entries.append(entry)
        self._storage.appended(self)

    async def verify(self, *, is_superseded: bool) -> bool:
        """Whether this owner has it still; see `Storage.verify`."""
        await self._storage.verify(self, is_superseded=is_superseded)
        return self.failure is None

    async def is_read_elsewhere(self) -> bool:
        """Whether somebody reads it who is not among `readers`."""
        return await self._storage.is_read_elsewhere(self)

    def notify(self, kind: str, **values: Any) -> None:
        """Tell those who listen now, in its place among the entries."""
        self.notices.append((len(self.entries), LogNotice(kind, values)))
        self._wake()

    def publish(self, num_entries: int) -> None:
        """The first `num_entries` may be seen."""
        self.num_published = max(self.num_published, num_entries)
        self._wake()

    def fail(self, error: Exception) -> None:
        """Readers cannot be told how it goes on: it went to another owner, or its storage is
        gone. They get what there is, and then this."""
        self.failure = error
        self._wake()
        if self.on_lost is not None:
            self.on_lost()

    # -- everybody's ------------------------------------------------------------------------

    def read(self, after: int = -1, *, find_again: FindAgain | None = None) -> LogReader:
        """A cursor behind the event numbered `after`; open as a context.

        Args:
            find_again: the log, where another gateway has taken the response over.

        The header's events are not among the entries: who reads from before their end makes them
        of the header first.
        """
        return LogReader(self, after, find_again)

    def cancel(self) -> None:
        """Have the owner, if it is here, stop the response; an ended one is left alone."""
        if self.on_cancel is not None and not self.is_ended:
            self.is_cancelled = True
            self.on_cancel()

    def changed_readers(self) -> None:
        if self.on_readers is not None:
            self.on_readers()

    def _wake(self) -> None:
        for reader in self.readers:
            reader.wake()


class LogReader:
    """A cursor.

    Attributes:
        log: what it reads; another one once the response has moved.

    with log.read(after) as reader:
        while (entries := await reader.next()) is not None:
            ...
    """

    __slots__ = ("_after", "_find_again", "_next_notice", "_on_more", "_position", "log")

    def __init__(self, log: ResponseLog, after: int, find_again: FindAgain | None) -> None:
        self._find_again = find_again
        self._on_more: Callable[[], None] | None = None
        self._begin(log, after)

    def _begin(self, log: ResponseLog, after: int) -> None:
        self.log = log
        self._after = after
        self._position = _position(log, after)
        self._next_notice = len(log.notices)

    def __enter__(self) -> LogReader:
        self.log.readers.add(self)
        self.log.changed_readers()
        return self

    def __exit__(self, *_: object) -> None:
        self._on_more = None
        self.log.readers.discard(self)
        self.log.changed_readers()

    @property
    def num_behind(self) -> int:
        """Entries that it has not taken yet."""
        return self.log.num_published - self._position

    async def next(self) -> list[Entry | LogNotice] | None:
        """What came since the last call, in order, up to a bound; waits while there is nothing;
        None at the end.

        Raises:
            Exception: what `ResponseLog.fail` was given, after all there is.
        """
        while True:
            found = self.take()
            if found:
                return found
            if self.num_behind:
                continue  # those were known to the reader
            if self.log.end is not None:
                return None
            if self.log.failure is not None:
                await self._move(self.log.failure)
                continue
            waiter = asyncio.get_running_loop().create_future()
            self.when_more(partial(_release, waiter))
            await waiter

    async def _move(self, failure: Exception) -> None:
        """Go on in the log of the response's next owner, if there is one; raises `failure`."""
        if self._find_again is None or not isinstance(failure, ResponseMovedError):
            raise failure
        log = await _found(self._find_again)
        taken = self.log.entries[: self._position]
        self.__exit__()
        self._begin(log, max(self._after, taken[-1].last_number) if taken else self._after)
        self.__enter__()

    @property
    def is_at_end(self) -> bool:
        """Whether nothing more comes of this log: `next` says what to do."""
        return self.log.end is not None or self.log.failure is not None

    def when_more(self, call: Callable[[], None]) -> None:
        """Have this called, once, when the log has changed. For who has taken all there is."""
        self._on_more = call

    def wake(self) -> None:
        call, self._on_more = self._on_more, None
        if call is not None:
            call()

    def take(self) -> list[Entry | LogNotice]:
        """What came since the last call, in order, up to a bound."""
        log = self.log
        stop = min(log.num_published, self._position + _MAX_AT_ONCE)
        found: list[Entry | LogNotice] = []
        while self._next_notice < len(log.notices):
            place, notice = log.notices[self._next_notice]
            if place > stop:
                break
            found += log.entries[self._position : place]
            found.append(notice)
            self._position = max(self._position, place)
            self._next_notice += 1
        found += log.entries[self._position : stop]
        self._position = stop
        # A replica may be behind what its reader had from the owner's gateway.
        while found and not isinstance(found[0], LogNotice) and found[0].last_number <= self._after:
            del found[0]
        return found


async def _found(find_again: FindAgain) -> ResponseLog:
    """Patiently: a gateway that has just lost its responses has many to find, and may have stood
    still when its storage answered."""
    for _ in range(_NUM_TRIES - 1):
        try:
            return await find_again()
        except StoreUnavailableError:
            await asyncio.sleep(_TRY_AGAIN_S)
    return await find_again()


def _release(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _position(log: ResponseLog, after: int) -> int:
    """The first entry with an event numbered above `after`. Deltas have one number each."""
    position = min(max(0, after + 1 - log.header.num_opening_events), len(log.entries))
    if position == len(log.entries) and position and log.entries[-1].last_number > after:
        position -= 1  # among the events of the end
    return min(position, log.num_published)
