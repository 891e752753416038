"""Sends a response's events from its log to a connection as they arrive.

The code that appends to the log also writes the events to the connections (`consume`), because
waking a task would cost more than the event.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from penstock.gateway.api.responses.events import EventWriter, Payloads
from penstock.gateway.errors import RequestRefusedError
from penstock.gateway.http.raw_writer import RawWriter
from penstock.gateway.sources import consume
from penstock.gateway.storage.response_log.cursor import LogNotice
from penstock.gateway.storage.response_log.log import ResponseLog
from penstock.gateway.storage.response_log.record import Entry

_MAX_NUMBER = (1 << 63) - 1


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
        self._notices = notices

    async def write_to(self, out: RawWriter, payloads: Payloads) -> None:
        """Write all events to the end.

        Args:
            payloads: encodes events that arrive together, each by itself.

        Raises:
            RequestRefusedError: the response has ended before the event numbered `after`.
            Exception: this gateway cannot read the log to its end; or what `out` raises.
        """
        events = EventWriter(self._log, payloads, notices=self._notices, after=self._after)
        of_next_delta, write = events.of_next_delta, out.write
        has_room, rest = True, list[Entry | LogNotice]()

        def write_all(payloads: Iterable[bytes]) -> bool:
            nonlocal has_room
            has_room = True
            for payload in payloads:
                has_room = write(payload)
            return has_room

        def write_delta(entry: Entry) -> bool:  # a token's way
            nonlocal has_room
            payload = of_next_delta(entry) if has_room else None
            if payload is None:
                return False
            try:
                has_room = write(payload)
            except Exception:  # which the task gets, when it takes the entry
                return False
            return True

        def handle(entries: list[Entry | LogNotice]) -> bool:
            nonlocal rest
            if has_room:
                return write_all(events.of(entries))
            rest = entries  # the last delta filled the connection
            return False

        with self._log.read(self._after) as reader:
            if not write_all(events.opening()):
                await out.drained()
            reader.on_entry = write_delta
            is_over = False
            while not is_over:
                is_over = await consume(reader, handle)
                if rest or not is_over:
                    await out.drained()
                    entries, rest = rest, []
                    write_all(events.of(entries))
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
