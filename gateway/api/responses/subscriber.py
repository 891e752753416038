"""Sends a response's events from its log to a connection as they arrive.

The code that appends to the log also writes the events to the connections (`pump`), because
waking a task would cost more than the event.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from penstock.gateway.api.responses.events import Event, EventWriter
from penstock.gateway.http.raw_writer import RawWriter, pump
from penstock.gateway.storage.response_log.log import FindAgain, LogNotice, ResponseLog
from penstock.gateway.storage.response_log.record import Entry

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

            def encode(entries: list[Entry | LogNotice]) -> Iterable[bytes]:
                events = self._events.of(entries, reader.log)
                return payloads(events) if events else ()

            has_room = True
            if opening := self._events.opening():
                for payload in payloads(opening):
                    has_room = out.write(payload)
            if not has_room:
                await out.drained()
            await pump(reader, encode, out)
