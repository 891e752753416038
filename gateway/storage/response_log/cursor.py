"""A reader's place in a log: every entry once and in order, then the end or a failure.

    entries   a b c d e f g h
              └─ visible ─┘     `Replica.num_visible`: all that are stored, or all if it is unlogged
                  ▲             a cursor's place: it takes what is between there and `num_visible`

A reader stays at its gateway's log whoever runs the response: a takeover changes what the log is to
the gateway, and not which log it is. Cursors do no I/O: whoever changes the log wakes them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from penstock.gateway.storage.response_log.record import Entry
from penstock.gateway.storage.response_log.replica import Replica, Role

_MAX_AT_ONCE = 32  # entries; bounds the memory of entries read but not yet sent to the client
_ENDED = Role.ENDED


@dataclass(frozen=True, slots=True)
class LogNotice:
    """An event for current readers only: it has no number and is neither stored nor replayed."""

    kind: str
    values: Mapping[str, Any] = field(default_factory=dict)


class Cursor:
    """A `Source` of entries and notices.

    Args:
        notices: each with the number of entries before it. Those that exist already are not read.
        after: only entries with an event of a higher number. No event may have this number yet, as
            a reader may have read more at another gateway than this one knows of.

    Attributes:
        on_entry: called at once with an entry that comes alone while somebody waits, instead of
            having it taken: a token's way. False: it is to be taken after all.
    """

    __slots__ = (
        "_after",
        "_failure",
        "_is_cut",
        "_next_notice",
        "_notices",
        "_on_more",
        "_place",
        "_replica",
        "on_entry",
    )

    def __init__(
        self, replica: Replica, notices: list[tuple[int, LogNotice]], *, after: int = -1
    ) -> None:
        self._replica = replica
        self._notices = notices
        # What the response waits for is told to whoever comes while it does.
        is_waiting = bool(notices) and notices[-1][0] >= len(replica.entries)
        is_told = is_waiting and notices[-1][1].kind == "progress"
        self._next_notice = len(notices) - is_told
        self._after = after
        place = bisect_right(replica.entries, after, key=attrgetter("last_number"))
        self._place = min(place, replica.num_visible)
        self._failure: Exception | None = None
        self._is_cut = False
        self._on_more: Callable[[], None] | None = None
        self.on_entry: Callable[[Entry], bool] | None = None

    @property
    def has_passed_all(self) -> bool:
        """Whether it has taken more than is visible, which was shown without being stored."""
        return self._place > self._replica.num_visible

    @property
    def is_ahead(self) -> bool:
        """Whether it begins after more than storage has, as far as this gateway knows. If this one
        runs the response and has shown nothing else, another gateway has shown it."""
        return self._after > self._replica.last_stored_number

    @property
    def is_over(self) -> bool:
        replica = self._replica
        return replica.role is _ENDED and self._place == replica.num_visible

    def take(self) -> list[Entry | LogNotice]:
        """New entries and notices in order, up to a bound; may be empty.

        Raises:
            Exception: the log has failed (`fail`).
        """
        replica, begin = self._replica, self._place
        if self._is_cut:
            assert self._failure is not None
            raise self._failure
        stop = replica.num_visible
        stop = min(stop, begin + _MAX_AT_ONCE)
        found: list[Entry | LogNotice] = []
        while self._next_notice < len(self._notices):
            place, notice = self._notices[self._next_notice]
            if place > stop:
                break
            found += replica.entries[begin:place]
            found.append(notice)
            begin = max(begin, place)
            self._next_notice += 1
        found += replica.entries[begin:stop]
        self._place = stop
        if self._after >= 0 and found:
            found = self._without_known(found)
        if self._failure is not None and not (found or self._is_behind or self.is_over):
            raise self._failure
        return found

    def _without_known(self, found: list[Entry | LogNotice]) -> list[Entry | LogNotice]:
        after, place = self._after, self._place
        if place and self._replica.entries[place - 1].last_number > after:
            self._after = -1
        return [each for each in found if isinstance(each, LogNotice) or each.last_number > after]

    def when_ready(self, call: Callable[[], None]) -> bool:
        """Have `call` called at once by the code that appends (`Source.when_ready`)."""
        replica = self._replica
        is_up_to_date = (
            self._place == replica.num_visible
            and self._next_notice == len(self._notices)
            and self._failure is None
            and replica.role is not _ENDED
        )
        if not is_up_to_date and (self._is_behind or self._failure is not None or self.is_over):
            return False
        self._on_more = call
        return True

    @property
    def _is_behind(self) -> bool:
        if self._place < self._replica.num_visible:
            return True
        notices, next_notice = self._notices, self._next_notice
        return next_notice < len(notices) and notices[next_notice][0] <= self._place

    def wake(self) -> None:
        call = self._on_more
        if call is None:
            return
        on_entry, replica, place = self.on_entry, self._replica, self._place
        if (
            on_entry is not None
            and replica.num_visible == place + 1
            and self._after < 0
            and self._next_notice == len(self._notices)
            and on_entry(replica.entries[place])
        ):
            self._place = place + 1
            return
        self._on_more = None
        call()

    def forget_call(self) -> None:
        """Nobody waits any longer."""
        self._on_more = self.on_entry = None

    def fail(self, error: Exception, *, at_once: bool) -> None:
        """`take` raises this error.

        Args:
            at_once: what is visible is not what this reader began to read.
        """
        self._failure, self._is_cut = error, at_once
        self.on_entry = None
        self.wake()
