"""Playing a plan to one reader: every frame at its time, and the fault that was ordered.

A reader needs no log: whatever it missed follows from the plan. All that is remembered of a
response is when it was cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from .plan import Fault, StreamPlan, Trouble

_MAX_CANCELLED = 4096
_LATE_S = 1e-3
_REPLAY_BURST = 16
_FATAL = (Trouble.CUT, Trouble.RESET, Trouble.ERROR, Trouble.MALFORMED)


class Frames(Protocol):
    """An answer in some wire format (`chunks`, `events`)."""

    malformed: bytes

    def head(self, after: int = -1) -> list[bytes]: ...
    def first_event(self, after: int = -1) -> int: ...
    def delta(self, event: int, *, lost: int | None = None) -> bytes: ...
    def end(
        self, num_events: int, status: str, *, after: int = -1, lost: int | None = None
    ) -> list[bytes]: ...
    def failure(self, num_events: int, *, lost: int | None = None) -> list[bytes]: ...


class Outlet(Protocol):
    """Where frames go."""

    async def send(self, frames: Sequence[bytes]) -> None: ...
    async def cut(self) -> None:
        """End properly, whatever is missing."""
        ...

    def reset(self) -> None: ...


@dataclass(slots=True)
class Lateness:
    """How well the server kept its own times, from an event's time to its write."""

    num_events: int = 0
    total_s: float = 0.0
    longest_s: float = 0.0
    num_late: int = 0  # by more than a millisecond

    def note(self, due_s: float) -> None:
        late_s = time.monotonic() - due_s
        self.num_events += 1
        self.total_s += late_s
        self.longest_s = max(self.longest_s, late_s)
        self.num_late += late_s > _LATE_S


class Readings:
    """Who reads which response, and when responses were cancelled (the last few thousand)."""

    def __init__(self) -> None:
        self.lateness = Lateness()
        self.num_open = 0
        self._cancelled_s: OrderedDict[str, float] = OrderedDict()
        self._open: defaultdict[str, set[Reading]] = defaultdict(set)

    def cancelled_s(self, response_id: str) -> float:
        """When; infinity if it was not."""
        return self._cancelled_s.get(response_id, math.inf)

    def cancel(self, response_id: str) -> None:
        """End a response now; a second time changes nothing."""
        self._cancelled_s.setdefault(response_id, time.monotonic())
        while len(self._cancelled_s) > _MAX_CANCELLED:
            self._cancelled_s.popitem(last=False)
        for reading in self._open.get(response_id, ()):
            reading.wake()

    @contextlib.contextmanager
    def open(self, response_id: str) -> Iterator[Reading]:
        reading = Reading(self, response_id)
        self._open[response_id].add(reading)
        self.num_open += 1
        try:
            yield reading
        finally:
            self.num_open -= 1
            self._open[response_id].discard(reading)
            if not self._open[response_id]:
                del self._open[response_id]


class Reading:
    """One reader of one response."""

    def __init__(self, readings: Readings, response_id: str) -> None:
        self._readings = readings
        self._response_id = response_id
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None

    @property
    def cancelled_s(self) -> float:
        return self._readings.cancelled_s(self._response_id)

    async def until(self, due_s: float) -> bool:
        """Wait for a time; whether the response still runs then."""
        while due_s <= self.cancelled_s:
            if due_s <= time.monotonic():
                return True
            self._waiter = self._loop.create_future()
            timer = self._loop.call_at(due_s, self.wake) if due_s < math.inf else None
            try:
                await self._waiter
            finally:
                self._waiter = None
                if timer is not None:
                    timer.cancel()
        return False

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Player:
    """One answer on its way to one reader.

    Args:
        fault: what goes wrong with it, if anything.
    """

    def __init__(
        self,
        plan: StreamPlan,
        frames: Frames,
        outlet: Outlet,
        *,
        readings: Readings,
        fault: Fault | None = None,
    ) -> None:
        self._plan = plan
        self._frames = frames
        self._outlet = outlet
        self._readings = readings
        self._fault = fault
        self._lost: int | None = None  # the event that was left out unnoticed

    async def play(self, reading: Reading, *, after: int = -1) -> None:
        """Send all events numbered above `after`, each when it is due."""
        plan, status = self._plan, "incomplete" if self._plan.is_limited else "completed"
        if head := self._frames.head(after):
            await self._outlet.send(head)
        event = plan.num_events
        for event in range(self._frames.first_event(after), plan.num_events + 1):
            trouble = self._trouble_at(event)
            due_s = math.inf if trouble is Trouble.STALL else plan.due_s(event)
            if not await reading.until(due_s):
                status, event = "cancelled", min(event, plan.num_due(reading.cancelled_s))
                break
            if trouble in _FATAL:
                await self._fail(trouble, event)
                return
            if event < plan.num_events:
                await self._send(event, trouble)
                await self._account(event, is_replay=after >= 0)
        frames = self._frames.end(event, status, after=after, lost=self._lost)
        if self._fault is not None and self._fault.trouble is Trouble.DOUBLE_END:
            frames.append(frames[-1])
        await self._outlet.send(frames)

    def _trouble_at(self, event: int) -> Trouble | None:
        """What goes wrong at an event, or at the end after the last; it happens once."""
        fault = self._fault
        if fault is None or fault.trouble is Trouble.DOUBLE_END:
            return None
        if self._plan.tokens_through(event) <= fault.after and event < self._plan.num_events:
            return None
        self._fault = None
        return fault.trouble

    async def _send(self, event: int, trouble: Trouble | None) -> None:
        frames = [self._frames.delta(event, lost=self._lost)]
        if trouble is Trouble.REPEAT:
            frames *= 2
        elif trouble is not None:
            frames.clear()
            self._lost = event if trouble is Trouble.LOSE else None
        if frames:
            await self._outlet.send(frames)

    async def _account(self, event: int, *, is_replay: bool) -> None:
        if not is_replay:
            self._readings.lateness.note(self._plan.due_s(event))
        elif event % _REPLAY_BURST == 0:
            await asyncio.sleep(0)  # a long replay lets others be on time

    async def _fail(self, trouble: Trouble, num_events: int) -> None:
        if trouble is Trouble.RESET:
            self._outlet.reset()
        elif trouble is Trouble.ERROR:
            await self._outlet.send(self._frames.failure(num_events, lost=self._lost))
        else:
            if trouble is Trouble.MALFORMED:
                await self._outlet.send([self._frames.malformed])
            await self._outlet.cut()
