"""The order of sequences that wait for a place: the one room that knows it.

First come, first served by arrival; a preempted sequence keeps its arrival and so returns to
the front.
"""

from __future__ import annotations

import heapq

from penstock.engine.request import Sequence


class WaitingQueue:
    """A heap by arrival. Removal marks; the marked are skipped when they surface."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []
        self._waiting: dict[int, Sequence] = {}

    def push(self, sequence: Sequence) -> None:
        # seq_id breaks ties in order of submission, so sequences are never compared.
        heapq.heappush(self._heap, (sequence.request.arrival_s, sequence.seq_id, sequence))
        self._waiting[sequence.seq_id] = sequence

    def peek(self) -> Sequence | None:
        """Who is next, or None."""
        while self._heap and self._heap[0][1] not in self._waiting:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence, wherever it stands; KeyError if it does not wait."""
        del self._waiting[sequence.seq_id]

    def __len__(self) -> int:
        return len(self._waiting)
