"""Which gateway runs which response, and when another takes it over: policy without I/O.

A gateway holds one lease, renewed by its heartbeats, for all responses that it runs; a running turn
of a conversation has none of its own. When a lease has expired, the other gateways take over its
responses one by one, each under the next epoch, with a fence that only one gateway can write
(`redis_steps`). So a gateway that is frozen for longer than its lease, and then goes on, has lost
what it ran, and finds that out before it shows anything that the others do not have:

    gateway A, frozen for 5 s          Redis                      gateway B
    beats every 0.5 s ───────────────► lease of A: 3 s
    an entry, epoch 1 ───────────────► stored ──────────────────► FOLLOWED: its readers get it
    ╳ frozen                           lease of A: expired ◄───── a scan finds no lease of A,
                                       fence, epoch 2 ◄────────── its notes, and the response
                                       entries, epoch 2 ◄──────── OWNED: runs it from the last entry
    ╳ goes on                                                     stored, also for its own readers
    an entry, epoch 1 ───────────────► refused
    or a beat: there was no lease
    VERIFYING: the last entry? ──────► epoch 2
    FOLLOWED: its run ends, entries    entries, epoch 2 ────────► (and to A, for A's readers)
    that were not stored are dropped

B's request under epoch 2 ends A's in the engine, so mostly A hears of that first, drops the tokens
that it had not read, and asks for the last entry without having written one (`Run.verify`). Nobody
had seen what A drops: an entry is shown once it is stored. If no gateway has fenced the log
off, A finds its own last entry, is OWNED again, and stores the rest.

A gateway that could not reach storage, or that was frozen, takes nothing over for a while: the
others' leases may have expired together with its own, and they need a moment to renew them. A
gateway that could not run a response now, because its engine is down, leaves responses to the
others, unless none takes them for some time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A takeover that this gateway has begun.

    Attributes:
        epoch: under which it is to run the response.
    """

    response_id: str
    epoch: int


class LeaseTimes(Protocol):
    """See `RedisLogSettings`."""

    @property
    def lease_s(self) -> float: ...

    @property
    def without_engine_s(self) -> float: ...


class Leases:
    """This gateway's lease, and what it knows of the others'. Times are monotonic seconds.

    Attributes:
        claims: takeovers that are to be finished, by response.
        is_leaving: this gateway stops, has no lease, and takes nothing over.
        has_lapsed: the lease had expired at the last heartbeat, and nobody has dealt with that.
        was_away: the last heartbeat did not reach storage.
    """

    def __init__(self, times: LeaseTimes) -> None:
        self.claims: dict[str, Claim] = {}
        self.is_leaving = False
        self.has_lapsed = False
        self._times = times
        self.was_away = False
        self._last_beat_s = math.inf  # there was none
        self._may_scan_s = 0.0
        self._unreadable_until_s: dict[str, float] = {}
        self._expired_at_s: dict[str, float] = {}

    def beaten(self, *, had_lease: bool) -> None:
        """A heartbeat has renewed the lease."""
        self.has_lapsed |= not had_lease

    def turned(self, now_s: float) -> None:
        """A heartbeat, and the work that comes with it, are done."""
        lease_s = self._times.lease_s
        if self.was_away or now_s - self._last_beat_s > lease_s * 2 / 3:
            self._may_scan_s = now_s + lease_s / 2
        self.was_away, self._last_beat_s = False, now_s

    def away(self) -> None:
        """A heartbeat did not reach storage."""
        self.was_away = True

    def may_scan(self, now_s: float) -> bool:
        """Whether an expired lease tells that its gateway is gone."""
        return not (self.is_leaving or self.was_away) and now_s >= self._may_scan_s

    def scanned(
        self, now_s: float, leases: Mapping[str, bool | None], *, can_run: bool
    ) -> list[str]:
        """The gateways whose responses this one takes over now.

        Args:
            leases: of all other gateways, whether it has one; None: that could not be read, so its
                gateway could not renew it either.
            can_run: whether a response could run here now.
        """
        if not self.may_scan(now_s):
            return []
        self._unreadable_until_s = {
            gateway: until_s
            for gateway, until_s in self._unreadable_until_s.items()
            if gateway in leases
        }
        due = []
        for gateway, has_lease in leases.items():
            if has_lease is None:
                self._unreadable_until_s[gateway] = now_s + self._times.lease_s
            elif has_lease:
                self._expired_at_s.pop(gateway, None)
            elif now_s >= self._unreadable_until_s.get(gateway, 0.0):
                waited_s = now_s - self._expired_at_s.setdefault(gateway, now_s)
                if can_run or waited_s >= self._times.without_engine_s:
                    due.append(gateway)
        return due

    def emptied(self, gateway: str) -> None:
        """A gateway that is gone has no responses left."""
        self._expired_at_s.pop(gateway, None)
