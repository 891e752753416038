"""A response's entries while it grows, and the cursors of those who read them.

The owner appends; an entry is seen once its storage has it (at once in memory, after Redis'
acknowledgement otherwise). Every reader, live or replaying, on the owner's gateway or another,
gets the same entries from a cursor of its own: a slow one gets several at a time, and costs
nothing but its place. Not known here: how entries are stored, what events they make.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Protocol

from penstock.gateway.responses.record import DeltaEntry, EndEntry, Entry, ResponseHeader


class Storage(Protocol):
    """Where a log's entries are kept."""

    def appended(self, log: ResponseLog) -> None:
        """An entry was added: see to it that `log.publish` is called once it is safe."""
        ...


class InMemory:
    """Storage that is this process: what is appended is seen."""

    def appended(self, log: ResponseLog) -> None:
        log.publish(len(log.entries))


IN_MEMORY = InMemory()


class ResponseLog:
    """One response.

    Attributes:
        entries: in order; the first `num_published` may be seen.
        is_resumable: False once an entry left for a client that storage did not confirm.
        num_readers: cursors open now.
    """

    def __init__(self, header: ResponseHeader, *, storage: Storage = IN_MEMORY) -> None:
        self.header = header
        self.entries: list[Entry] = []
        self.num_published = 0
        self.num_readers = 0
        self.is_resumable = True
        self.on_idle: Callable[[], None] | None = None  # the last reader has left
        self.on_cancel: Callable[[], None] | None = None  # somebody wants it to stop; its owner's
        self._storage = storage
        self._failure: Exception | None = None
        self._waiters: set[asyncio.Future[None]] = set()

    @property
    def next_number(self) -> int:
        """The sequence number of the next event."""
        if not self.entries:
            return self.header.num_opening_events
        return self.entries[-1].last_number + 1

    @property
    def is_ended(self) -> bool:
        """Whether readers can see the end."""
        return self.num_published > 0 and isinstance(self.entries[self.num_published - 1], EndEntry)

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

    def publish(self, num_entries: int) -> None:
        """The first `num_entries` may be seen."""
        self.num_published = max(self.num_published, num_entries)
        self._wake()

    def cancel(self) -> None:
        """Have the owner, if it is here, stop the response; an ended one is left alone."""
        if self.on_cancel is not None and not self.is_ended:
            self.on_cancel()

    def fail(self, error: Exception) -> None:
        """Readers cannot be told how it goes on: it went to another owner, or its storage is
        gone. They get what there is, and then this."""
        self._failure = error
        self._wake()

    # -- readers' ---------------------------------------------------------------------------

    async def read(self, after: int = -1) -> AsyncGenerator[tuple[int, list[Entry]], None]:
        """What has a number above `after`, as it comes: (index of the first entry, entries).

        The header's events are not among them: whoever reads from before their end makes them of
        the header first.

        Raises:
            Exception: what `fail` was given, after all there is.
        """
        self.num_readers += 1
        try:
            position = self._position(after)
            while True:
                if position < self.num_published:
                    found = self.entries[position : self.num_published]
                    yield position, found
                    position += len(found)
                elif self.is_ended:
                    return
                elif self._failure is not None:
                    raise self._failure
                else:
                    await self._news()
        finally:
            self.num_readers -= 1
            if self.num_readers == 0 and self.on_idle is not None:
                self.on_idle()

    def _position(self, after: int) -> int:
        """The first entry with an event numbered above `after`. Deltas have one number each."""
        guess = max(0, after + 1 - self.header.num_opening_events)
        if guess >= len(self.entries):
            guess = len(self.entries)
            if self.entries and self.entries[-1].last_number > after:
                guess -= 1
        return guess

    async def _news(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
