"""What is told of the waiting queue: how fast it drains, and who stands where.

Not known here: who comes before whom (`waiting_queue`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from penstock.engine.request import Request, RequestOutput
from penstock.engine.scheduling.waiting_queue import WaitingQueue, is_returning

POSITIONS_INTERVAL_S = 0.25
_MAX_SHARE = 0.02  # of the time, for playing through the order of a long queue
_MEMORY_S = 10.0  # after which a measurement weighs 1/e


class QueueWatch:
    """Looks at the queue after every step.

    Args:
        clock: seconds.
    """

    def __init__(self, queue: WaitingQueue, clock: Callable[[], float]) -> None:
        self._queue = queue
        self._clock = clock
        self._told: dict[str, int] = {}  # of requests that asked: the position they know, or -1
        self._positions_due_s = -math.inf
        self._last_s = clock()
        self._had_waiting = False
        self._num_taken = 0
        self._busy_s = self._busy_tokens = 0.0  # while somebody waited, both fading alike

    @property
    def tokens_per_s(self) -> float:
        """Prompt tokens that leave the queue while somebody waits; 0 before anybody did."""
        return self._busy_tokens / self._busy_s if self._busy_s > 0 else 0.0

    def add(self, request: Request) -> None:
        """A new request waits."""
        self._had_waiting = True
        if request.wants_queue_position:
            self._told[request.request_id] = -1

    def look(self) -> list[RequestOutput]:
        """The new positions of those that asked, at most every `POSITIONS_INTERVAL_S`."""
        now_s = self._clock()
        self._measure(now_s)
        if not self._told or now_s < self._positions_due_s:
            return []
        outputs = self._positions()
        cost_s = self._clock() - now_s
        self._positions_due_s = now_s + max(POSITIONS_INTERVAL_S, cost_s / _MAX_SHARE)
        return outputs

    def _measure(self, now_s: float) -> None:
        elapsed_s, self._last_s = now_s - self._last_s, now_s
        num_new, self._num_taken = self._queue.num_taken - self._num_taken, self._queue.num_taken
        if self._had_waiting and elapsed_s > 0:
            kept = math.exp(-elapsed_s / _MEMORY_S)
            self._busy_s = self._busy_s * kept + elapsed_s
            self._busy_tokens = self._busy_tokens * kept + num_new
        self._had_waiting = len(self._queue) > 0

    def _positions(self) -> list[RequestOutput]:
        told, self._told = self._told, {}
        outputs, num_tokens = [], 0
        for position, sequence in enumerate(self._queue.in_order()):
            request_id = sequence.request.request_id
            if request_id in told and not is_returning(sequence):
                self._told[request_id] = position
                if told[request_id] != position:
                    outputs.append(
                        RequestOutput(
                            request_id=request_id,
                            queue_position=position,
                            num_tokens_ahead=num_tokens,
                        )
                    )
            num_tokens += len(sequence.token_ids) - sequence.num_computed_tokens
        return outputs
