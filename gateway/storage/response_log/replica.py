"""What a gateway knows of a response's log: a state machine without I/O.

    OPENING ─opened─▶ OWNED ◀─────── claimed ─────── FOLLOWED ─received an end─▶ ENDED
                      │   ▲                           ▲ ▲  │
                unsure▼   │last_read                  │ │  └─ failed ─▶ LOST
                     VERIFYING ─────── fenced ────────┘ │
                      │ give_up                         │
                      ▼                                 │
                     UNLOGGED ──────── fenced ──────────┘

`fenced` also leads from OWNED to FOLLOWED: when the engine, or an orderly stop, is the first to say
that another gateway runs the response.

Each method is an event: it changes the state and returns what its shell has to do, as bits. A shell
(memory, disk, Redis) carries that out and tells the machine what came of it, late, twice or never:
`pending` says at any time what is still to be done.

A log has an epoch, which rises with each takeover, and storage refuses entries of a lower one. The
gateway that runs a response appends under its epoch. An entry becomes visible once storage has it,
so every gateway shows the same entries. If storage does not confirm in time, the response continues
without it: its entries are visible at once, and the log is no longer resumable.
"""

from __future__ import annotations

import enum
from typing import Final

from penstock.gateway.storage.response_log.record import Entry

NOTHING: Final = 0
SHOW: Final = 1  # wake the readers: more is visible
STORE: Final = 2  # while VERIFYING read storage's last entry; then write what it lacks
MEND: Final = 4  # storage may have only a part: mark it as broken, or store it whole
FOLLOW: Final = 8  # read what another gateway stores
FORWARD: Final = 16  # send a cancel to the gateway that has the response now
RELEASE: Final = 32  # this gateway need no longer be known as the one that runs it
RUN: Final = 64  # begin to run the response
STOP: Final = 128  # its run here is over: another gateway has it
CANCEL: Final = 256  # its run is to stop
END: Final = 512  # its run is over: it has ended
REJOIN: Final = 1024  # fail the readers whose events may be others than those that follow
FAIL: Final = 2048  # fail all readers
Commands = int


class Role(enum.Enum):
    """What this gateway is to a log."""

    OPENING = "opening"  # its creator, and the header is not stored yet
    OWNED = "owned"  # runs the response
    VERIFYING = "verifying"  # runs it, and must find out what storage has before it adds to it
    UNLOGGED = "unlogged"  # runs it without storage
    FOLLOWED = "followed"  # reads what another gateway stores
    LOST = "lost"  # can no longer read it
    ENDED = "ended"


_OPENING, _OWNED, _VERIFYING, _UNLOGGED = Role.OPENING, Role.OWNED, Role.VERIFYING, Role.UNLOGGED
_FOLLOWED, _LOST, _ENDED = Role.FOLLOWED, Role.LOST, Role.ENDED


class BrokenLogError(Exception):
    """The stored log is marked broken, has a gap, or cannot be decoded: it cannot be replayed."""


class Replica:
    """One log, as one gateway has it.

    Args:
        num_opening_events: before the first entry's events.

    Attributes:
        entries: in order; the first `num_visible` are shown to readers.
        num_stored: entries that storage has, as far as this gateway knows.
        position: epoch and number of the last thing that storage is known to have: the header, an
            entry, or a fence, whose number is 0. While the response runs here, the epoch is this
            gateway's.
        is_resumable: False once an entry was shown without being stored.
        is_cancelled: a cancel arrived at this gateway while it ran the response.
        is_partial: storage may have a part of it, and no mark that the rest is missing.
        is_begun: storage has this log's header, and not another's under its id.
    """

    __slots__ = (
        "entries",
        "epoch",
        "is_begun",
        "is_cancelled",
        "is_partial",
        "is_resumable",
        "num_opening_events",
        "num_stored",
        "num_visible",
        "number",
        "role",
    )

    def __init__(self, role: Role, *, num_opening_events: int) -> None:
        self.role = role
        self.num_opening_events = num_opening_events
        self.epoch, self.number = 1, num_opening_events - 1
        self.entries: list[Entry] = []
        self.num_stored = 0
        self.num_visible = 0
        self.is_resumable = True
        self.is_cancelled = False
        self.is_partial = False
        self.is_begun = role is not _OPENING

    @property
    def position(self) -> tuple[int, int]:
        return self.epoch, self.number

    @property
    def next_number(self) -> int:
        """The sequence number of the next event."""
        return self.entries[-1].last_number + 1 if self.entries else self.num_opening_events

    @property
    def last_stored_number(self) -> int:
        """The number of the last event that storage has, as far as this gateway knows."""
        num = self.num_stored
        return self.entries[num - 1].last_number if num else self.num_opening_events - 1

    @property
    def is_stored(self) -> bool:
        return self.num_stored == len(self.entries)

    @property
    def runs(self) -> bool:
        """Whether this gateway runs the response."""
        role = self.role
        return role is _OWNED or role is _VERIFYING or role is _UNLOGGED

    @property
    def pending(self) -> Commands:
        """What is to be done for storage, whatever became of earlier attempts."""
        role = self.role
        if role is _VERIFYING or (role is _OWNED and self.num_stored < len(self.entries)):
            return STORE
        return MEND if self.is_partial else NOTHING

    # -- its beginning ------------------------------------------------------------------------

    def opened(self) -> Commands:
        """Storage has the header."""
        assert self.role is _OPENING
        self.role, self.is_begun = _OWNED, True
        return RUN

    def not_opened(self, *, is_refused: bool) -> Commands:
        """The response does not begin.

        Args:
            is_refused: storage has another log of this id; otherwise it may have this header.
        """
        assert self.role in (_OPENING, _OWNED)
        self.role = _LOST
        self.is_partial = not is_refused
        return NOTHING if is_refused else MEND

    def claimed(self, epoch: int) -> Commands:
        """This gateway has fenced the log with this epoch and read it up to the fence: it runs the
        response from now on. Nothing changes if there was another fence meanwhile, or an end."""
        if self.role is not _FOLLOWED or self.position != (epoch, 0):
            return NOTHING
        self.role, self.is_cancelled = _OWNED, False
        return RUN

    # -- while this gateway runs it -----------------------------------------------------------

    def append(self, epoch: int, entry: Entry) -> Commands:
        """The run of this epoch appends an entry. That of an earlier epoch is over, and has no say
        any longer."""
        role = self.role
        if epoch != self.epoch:
            return NOTHING
        if role is _OWNED or role is _VERIFYING:
            self.entries.append(entry)
            return STORE
        if role is _UNLOGGED:
            self.entries.append(entry)
            return self._show_all()
        return NOTHING

    def acknowledged(self, epoch: int, num_entries: int) -> Commands:
        """Storage has the first `num_entries`, written under this epoch."""
        if epoch != self.epoch or not (self.role is _OWNED or self.role is _VERIFYING):
            return NOTHING  # a late reply
        if num_entries > self.num_stored:
            last = self.entries[num_entries - 1]
            self.num_stored, self.number = num_entries, last.number + last.num_events - 1
            if num_entries > self.num_visible:
                self.num_visible = num_entries
            if last.is_end:
                self.role = _ENDED
                return SHOW | END | RELEASE
            return SHOW
        return NOTHING

    def unsure(self, epoch: int) -> Commands:
        """Storage may lack entries, or have another gateway's: it did not answer, refused an
        entry's number, or this gateway was frozen for longer than its lease."""
        if epoch == self.epoch and self.role is _OWNED:
            self.role = _VERIFYING
        return self.pending

    def last_read(self, epoch: int, last: tuple[int, int] | None) -> Commands:
        """Storage's last entry, read while this gateway ran the response under `epoch`.

        Args:
            last: its epoch and number; None: there is no log.
        """
        if epoch != self.epoch or self.role is not _VERIFYING:
            return NOTHING
        if last is not None and last[0] > epoch:
            return self.fenced(epoch)
        num_entries = None if last is None or last[0] < epoch else self._num_up_to(last[1])
        if num_entries is None:
            return self.give_up(epoch)  # storage has lost entries
        self.role = _OWNED
        return self.acknowledged(epoch, num_entries) | self.pending

    def late(self, epoch: int) -> Commands:
        """Storage has not answered in time."""
        return self.unsure(epoch) if self.is_stored else self.give_up(epoch)

    def give_up(self, epoch: int) -> Commands:
        """Continue without storage: it is away, full, or has lost this log."""
        if epoch != self.epoch or not (self.role is _OWNED or self.role is _VERIFYING):
            return NOTHING
        self.role, self.is_resumable, self.is_partial = _UNLOGGED, False, True
        return self._show_all() | MEND | REJOIN

    def retried(self, epoch: int) -> Commands:
        """Storage is to get the whole log, after which it is as if nothing had been amiss."""
        if epoch == self.epoch and self.role is _UNLOGGED:
            self.role, self.is_partial = _VERIFYING, False
        return NOTHING

    def stored_whole(self, epoch: int, num_entries: int) -> Commands:
        """Storage has the first `num_entries`, however few it had before."""
        if epoch != self.epoch or self.role is _UNLOGGED:
            return NOTHING
        self.is_resumable, self.is_partial = True, False
        if self.role is _VERIFYING:
            self.role = _OWNED
        return self.acknowledged(epoch, num_entries)

    def cancel(self) -> Commands:
        """Somebody wants the response stopped."""
        if not self.runs:
            return NOTHING
        self.is_cancelled = True
        return CANCEL

    # -- when it no longer runs it ------------------------------------------------------------

    def fenced(self, epoch: int) -> Commands:
        """Another gateway continues the response from what is stored, or is to. The epoch stays
        until the fence is read."""
        if epoch != self.epoch or not self.runs:
            return NOTHING
        commands = STOP | FOLLOW
        if self.is_cancelled:
            commands |= FORWARD
        if not self.is_resumable:
            commands |= REJOIN
        self.role, self.is_resumable, self.is_partial = _FOLLOWED, True, False
        del self.entries[self.num_stored :]
        self.num_visible = self.num_stored
        return commands

    def marked(self, epoch: int, last: tuple[int, int] | None) -> Commands:
        """A broken mark was sent; storage's last entry afterwards. Only under a higher epoch can
        there be another, and then a gateway has taken the response over before the mark."""
        if not self.is_partial or epoch != self.epoch:
            return NOTHING
        self.is_partial = False
        if last is not None and last[0] > epoch:
            return self.fenced(epoch)
        return NOTHING if self.runs else RELEASE

    def first_read(self, *, is_ours: bool) -> Commands:
        """Storage's first entry, if it was unknown whether it has this log's header."""
        self.is_begun = is_ours
        if is_ours:
            return MEND
        self.is_partial = False
        return RELEASE

    # -- while another gateway runs it --------------------------------------------------------

    def received(self, after: tuple[int, int], at: tuple[int, int], entry: Entry | None) -> bool:
        """Storage has an entry `at`, next to the one at `after`. To be shown if there were any.

        Args:
            entry: None for a fence.

        Returns: False for one that was already read, or is not to be.

        Raises:
            BrokenLogError: there is a gap before it.
        """
        if self.role is not _FOLLOWED or self.position != after:
            return False
        if entry is not None and entry.number != self.next_number:
            raise BrokenLogError(f"entry {entry.number} instead of {self.next_number}")
        self.epoch, self.number = at
        if entry is not None:
            self.entries.append(entry)
            self.num_stored = self.num_visible = len(self.entries)
            if entry.is_end:
                self.role = _ENDED
        return True

    def load(self, entries: list[Entry]) -> None:
        """All entries that storage has, where it has no fences yet."""
        assert self.role is _FOLLOWED
        self.entries += entries
        self.num_stored = self.num_visible = len(entries)
        if entries:
            self.number = entries[-1].last_number
            self.role = _ENDED if entries[-1].is_end else _FOLLOWED

    def failed(self) -> Commands:
        """Storage no longer has it, or is away for too long."""
        if self.role is not _FOLLOWED:
            return NOTHING
        self.role = _LOST
        return FAIL

    # -- common -------------------------------------------------------------------------------

    def _show_all(self) -> Commands:
        """Without storage."""
        self.num_visible = len(self.entries)
        if self.entries and self.entries[-1].is_end:
            self.role = _ENDED
            return SHOW | END if self.is_partial else SHOW | END | RELEASE
        return SHOW

    def _num_up_to(self, number: int) -> int | None:
        """How many entries storage has if its last one has this number; None if it should have
        more, or has what this gateway did not write."""
        if number == self.number:
            return self.num_stored
        for index in range(self.num_stored, len(self.entries)):
            if self.entries[index].last_number == number:
                return index + 1
        return None
