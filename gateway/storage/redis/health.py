"""What a gateway knows of Redis: how far away it is, and what is wrong with it.

Nothing is asked for this: errors are noted where they occur, and the round trip is that of the
heartbeats (`redis_ownership`).
"""

from __future__ import annotations

import time
from collections import deque

from penstock.gateway.storage.redis.errors import SLOW, STATES, state_of

SLOW_S = 0.1  # a round trip that a client notices at every token
_NUM_SAMPLES = 8  # of the round trip, two a second
_REMEMBERED_S = 5.0  # a state, after the last error that told it
COMPLAINT_EVERY_S = 10.0
FOREIGN_EVERY_S = 600.0  # about foreign content, which stays until somebody removes it
_MAX_SUBJECTS = 1000
_MAX_PATIENCE_S = 8.0
_DOES_NOT_REFUSE = frozenset({"ok", SLOW, "timeout", "unreachable", "cluster_down", "moving"})


class RedisHealth:
    """The health of one Redis, as one gateway sees it."""

    states = tuple(STATES)

    def __init__(self) -> None:
        self._samples_s: deque[float] = deque(maxlen=_NUM_SAMPLES)
        self._state, self._until_s = "ok", 0.0
        self._complaints_s: dict[str, float] = {}  # by subject: when the next one is due

    @property
    def state(self) -> str:
        """One of `states`."""
        if time.monotonic() < self._until_s:
            return self._state
        return SLOW if self.is_slow else "ok"

    @property
    def refuses(self) -> bool:
        """Whether it answers, but does not do what it is told."""
        return self.state not in _DOES_NOT_REFUSE

    def trouble(self) -> tuple[str, str] | None:
        """The state and a message, unless it is well."""
        state = self.state
        if state == "ok":
            return None
        if state == SLOW:
            return state, f"{STATES[SLOW]}: a round trip takes {self.round_trip_s:.2f} s"
        return state, STATES[state]

    # -- distance -----------------------------------------------------------------------------

    @property
    def round_trip_s(self) -> float:
        """The least of the latest: the distance, without pauses of this process or of Redis. 0
        while it is unknown."""
        return min(self._samples_s, default=0.0)

    @property
    def is_slow(self) -> bool:
        return self.round_trip_s >= SLOW_S

    def note_round_trip(self, seconds: float) -> None:
        self._samples_s.append(seconds)

    def patience_s(self, least_s: float, *, num_round_trips: int) -> float:
        """How long to wait for work of so many round trips, retries and a connection included."""
        return max(least_s, min(num_round_trips * self.round_trip_s, _MAX_PATIENCE_S))

    # -- errors -------------------------------------------------------------------------------

    def note(self, error: BaseException) -> str:
        """Note an error by which Redis is unavailable; the state that it tells. A distant Redis
        that exceeds a time-out is slow."""
        state = state_of(error)
        if state == "timeout" and self.is_slow:
            state = SLOW
        self._state, self._until_s = state, time.monotonic() + _REMEMBERED_S
        return state

    def describe(self, error: BaseException) -> str:
        """Note an error; what messages say of it, as "Redis is out of memory"."""
        return STATES[self.note(error)]

    def may_complain(self, subject: str, *, every_s: float = COMPLAINT_EVERY_S) -> bool:
        """Whether to log a line about a subject now, so that a Redis that fails at every call does
        not fill the log."""
        now_s = time.monotonic()
        if now_s < self._complaints_s.get(subject, 0.0):
            return False
        if len(self._complaints_s) >= _MAX_SUBJECTS:
            self._complaints_s.clear()
        self._complaints_s[subject] = now_s + every_s
        return True
