"""Sends a response's events from its log to a connection as they arrive.

    log.append ──► Subscriber ──► RawWriter.write       while the connection has room
                      └─ task: first events, a full connection, the end, the next owner

The code that appends to the log also writes the events to the connections, because waking a task
would cost more than the event. The reader's own task handles everything that has to wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence

from penstock.gateway.api.responses.events import Event, EventWriter
from penstock.gateway.http.raw_writer import RawWriter
from penstock.gateway.storage.response_log.log import FindAgain, LogReader, ResponseLog

Payloads = Callable[[Sequence[Event]], Iterable[bytes]]


class Subscriber:
    """One reader of one response.

    Args:
        after: only events with a higher number.
        notices: kinds of `penstock.*` events that the reader asked for.
        find_again: see `ResponseLog.read`.
    """

    def __init__(
        self,
        log: ResponseLog,
        *,
        after: int = -1,
        notices: Collection[str] = (),
        find_again: FindAgain | None = None,
    ) -> None:
        self._log = log
        self._after = after
        self._find_again = find_again
        self._events = EventWriter(log.header, notices=notices, after=after)

    async def write_to(self, out: RawWriter, payloads: Payloads) -> None:
        """Write all events to the end.

        Args:
            payloads: encodes events that arrive together.

        Raises:
            Exception: this gateway cannot read the log to its end; or what `out` raises.
        """
        with self._log.read(self._after, find_again=self._find_again) as reader:
            pump = _Pump(reader, self._events, out=out, payloads=payloads)
            if not pump.write(self._events.opening()):
                await out.drained()
            while (entries := await reader.next()) is not None:
                events = self._events.of(entries, reader.log)
                if not (pump.write(events) and await pump.run()):
                    await out.drained()


class _Pump:
    """Writes new events without a task of its own."""

    __slots__ = ("_events", "_is_over", "_out", "_payloads", "_reader")

    def __init__(
        self, reader: LogReader, events: EventWriter, *, out: RawWriter, payloads: Payloads
    ) -> None:
        self._reader = reader
        self._events = events
        self._out = out
        self._payloads = payloads
        self._is_over: asyncio.Future[bool] | None = None  # while it runs

    def write(self, events: Sequence[Event]) -> bool:
        """Write events; False if the connection has no room for more."""
        has_room = True
        if events:
            for payload in self._payloads(events):
                has_room = self._out.write(payload)
        return has_room

    async def run(self) -> bool:
        """Return when something other than the log has to be waited for; False if that is room on
        the connection."""
        self._is_over = asyncio.get_running_loop().create_future()
        self._write_new()
        try:
            return await self._is_over
        finally:
            self._is_over = None  # an exception in it refers back to this object

    def _write_new(self) -> None:
        reader = self._reader
        if self._is_over is None or self._is_over.done():
            return  # the reader has left
        try:
            has_room = self.write(self._events.of(reader.next_nowait(), reader.log))
            while has_room and reader.num_behind:
                has_room = self.write(self._events.of(reader.next_nowait(), reader.log))
        except Exception as error:  # belongs to the reader, not to the code that appended
            self._is_over.set_exception(error)
            return
        if has_room and not reader.is_at_end:
            reader.when_more(self._write_new)
        else:
            self._is_over.set_result(has_room)
