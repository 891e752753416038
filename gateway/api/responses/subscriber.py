"""Sends a response's events from its log to a connection as they arrive.

The code that appends to the log also writes the events to the connections (`pump`), because
waking a task would cost more than the event.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from penstock.gateway.api.responses.events import Event, EventWriter
from penstock.gateway.errors import RequestRefusedError
from penstock.gateway.http.raw_writer import RawWriter, pump
from penstock.gateway.storage.response_log.cursor import LogNotice
from penstock.gateway.storage.response_log.log import ResponseLog
from penstock.gateway.storage.response_log.record import Entry

_MAX_NUMBER = (1 << 63) - 1
Payloads = Callable[[Sequence[Event]], Iterable[bytes]]


class Subscriber:
    """One reader of one response.

    Args:
        after: only events with a higher number. While the response runs it may be a number that
            no event has yet: this gateway may learn of an event after its reader.
        notices: kinds of `penstock.*` events that the reader asked for.
    """

    def __init__(
        self,
        log: ResponseLog,
        *,
        after: int = -1,
        notices: Collection[str] = (),
    ) -> None:
        self._log = log
        self._after = after
        self._events = EventWriter(log.header, notices=notices, after=after)

    async def write_to(self, out: RawWriter, payloads: Payloads) -> None:
        """Write all events to the end.

        Args:
            payloads: encodes events that arrive together.

        Raises:
            RequestRefusedError: the response has ended before the event numbered `after`.
            Exception: this gateway cannot read the log to its end; or what `out` raises.
        """
        with self._log.read(self._after) as reader:

            def encode(entries: list[Entry | LogNotice]) -> Iterable[bytes]:
                events = self._events.of(entries, self._log)
                return payloads(events) if events else ()

            has_room = True
            if opening := self._events.opening():
                for payload in payloads(opening):
                    has_room = out.write(payload)
            if not has_room:
                await out.drained()
            await pump(reader, encode, out)
            check_start(self._after, self._log)


def check_start(after: int, log: ResponseLog) -> None:
    """
    Raises:
        RequestRefusedError: the log has ended, without an event numbered `after`.
    """
    if log.end is not None and after > log.end.last_number:
        raise invalid_start(
            f"starting_after is {after}, but this response ended with event {log.end.last_number}"
        )


def starting_after_of(value: object) -> int:
    """
    Raises:
        RequestRefusedError: it is not a number that `starting_after` can be.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not -1 <= value <= _MAX_NUMBER:
        raise invalid_start(
            "starting_after must be an event's sequence number, or -1 for all events"
        )
    return value


def invalid_start(message: str) -> RequestRefusedError:
    return RequestRefusedError(message, code="invalid_value", param="starting_after")
