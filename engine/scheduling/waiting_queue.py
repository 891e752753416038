"""The order of service: who waits for a place, and who comes before whom.

    fcfs       by arrival
    priority   by the request's priority (lower first), then by arrival; for every
               `aging_s` a request has been here, it moves up by one, so nothing starves

A preempted sequence keeps its arrival, and so returns to the front of its equals.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

from penstock.engine.config import SchedulingPolicy
from penstock.engine.request import Sequence


class ServiceOrder:
    """Ranks sequences; lower comes first.

    Args:
        clock: seconds, by the same clock as requests' `arrival_s`.
    """

    def __init__(
        self, policy: SchedulingPolicy, *, aging_s: float, clock: Callable[[], float]
    ) -> None:
        self._is_fcfs = policy == "fcfs"
        self._aging_s = aging_s
        self._clock = clock

    def rank(self, sequence: Sequence) -> tuple[int, float, int]:
        """Band, arrival, order of submission."""
        request = sequence.request
        band = 0 if self._is_fcfs else request.priority - self._num_aged(sequence)
        return band, request.arrival_s, sequence.seq_id

    def next_change_s(self, sequence: Sequence) -> float:
        """When the sequence's rank will next improve by itself."""
        if self._is_fcfs:
            return math.inf
        return sequence.request.arrival_s + (self._num_aged(sequence) + 1) * self._aging_s

    def now_s(self) -> float:
        return self._clock()

    def _num_aged(self, sequence: Sequence) -> int:
        return max(0, int((self._clock() - sequence.request.arrival_s) // self._aging_s))


class WaitingQueue:
    """Waiting sequences by rank: a heap, with entries renewed as sequences age.

    Removal marks; an entry that is out of date is skipped when it surfaces.
    """

    def __init__(self, order: ServiceOrder) -> None:
        self.order = order
        self._heap: list[tuple[tuple[int, float, int], Sequence]] = []
        self._waiting: dict[int, tuple[int, float, int]] = {}  # seq_id → its valid rank
        self._aging: list[tuple[float, int, Sequence]] = []  # when a rank changes

    def push(self, sequence: Sequence) -> None:
        rank = self.order.rank(sequence)
        heapq.heappush(self._heap, (rank, sequence))  # ranks differ: seq_id is in them
        self._waiting[sequence.seq_id] = rank
        change_s = self.order.next_change_s(sequence)
        if change_s < math.inf:
            heapq.heappush(self._aging, (change_s, sequence.seq_id, sequence))

    def peek(self) -> Sequence | None:
        """Who is next, or None."""
        self._age()
        while self._heap and self._waiting.get(self._heap[0][1].seq_id) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def discard(self, sequence: Sequence) -> None:
        """Take out a sequence, wherever it stands, if it waits."""
        self._waiting.pop(sequence.seq_id, None)

    def __len__(self) -> int:
        return len(self._waiting)

    def _age(self) -> None:
        now_s = self.order.now_s()
        due = []
        while self._aging and self._aging[0][0] <= now_s:
            due.append(heapq.heappop(self._aging)[2])
        for sequence in due:  # pushed only now: rounding may make its next change due at once
            if sequence.seq_id in self._waiting:
                self.push(sequence)
