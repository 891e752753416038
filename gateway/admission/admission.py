"""The gate: whether a request whose cost is known may go to the engine, and what it holds there.

    tenant's limits (429) → queue bounds (503) → predicted time to first token (503) → reservation

A request holds its reservation from here to its end, however it ends.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.engine.request import SamplingParams
from penstock.gateway.admission.engine_queue import EngineQueue, Waiting
from penstock.gateway.admission.quotas import NO_HOLD, Hold, Quotas
from penstock.gateway.admission.refusals import NotAdmittedError, rate_limit_headers
from penstock.gateway.auth.callers import ANYBODY, Caller

_FIRST_OUTPUT = 256.0  # tokens
_WEIGHT = 0.1  # of the newest request in the means


class Reservation:
    """What one admitted request holds: its part of the tenant's limits, its place in the queue.

    Whoever runs the request says `started` when the engine has begun it, and `settle` at its end;
    both may be said again, and only the first time counts.
    """

    __slots__ = ("_caller", "_cost", "_hold", "_queue", "_waiting", "is_settled")

    def __init__(
        self,
        caller: Caller = ANYBODY,
        *,
        hold: Hold = NO_HOLD,
        cost: ExpectedCost | None = None,
        queue: EngineQueue | None = None,
        waiting: Waiting | None = None,
    ) -> None:
        self._caller = caller
        self._hold = hold
        self._cost = cost
        self._queue = queue
        self._waiting = waiting
        self.is_settled = False

    def started(self) -> None:
        """It waits no more."""
        waiting = self._waiting
        if waiting is not None and self._queue is not None:
            self._waiting = None
            self._queue.leave(waiting)

    def wait_s(self, num_tokens_ahead: int) -> float:
        """Until the engine has begun so many queued tokens, as predicted; 0 if nothing is known."""
        return 0.0 if self._queue is None else self._queue.drain_s(num_tokens_ahead)

    def settle(
        self,
        *,
        num_prompt: int = 0,
        num_cached: int = 0,
        num_output: int = 0,
        num_branches: int = 1,
    ) -> None:
        """It ended, having used so many tokens; without any it never ran."""
        if self.is_settled:
            return
        self.is_settled = True
        self.started()
        if num_output and self._cost is not None:
            self._cost.learn(
                self._caller.tenant,
                num_prompt=num_prompt,
                num_cached=num_cached,
                output_tokens=num_output / num_branches,
            )
        self._hold.settle(num_prompt - num_cached + num_output)


class Admission:
    """The gate of one gateway."""

    def __init__(self, quotas: Quotas, queue: EngineQueue) -> None:
        self._quotas = quotas
        self._queue = queue
        self._cost = ExpectedCost()

    async def admit(
        self,
        caller: Caller,
        num_prompt: int,
        params: SamplingParams,
        *,
        deadline_s: float | None = None,
    ) -> Reservation:
        """Let a request in.

        Args:
            num_prompt: tokens.
            deadline_s: within which its first token is wanted, from now.

        Raises:
            RequestRefusedError: 429 for the tenant's own limits, 503 for everybody's queue;
                nothing is held then.
        """
        tenant = caller.tenant
        output = self._cost.output_tokens(tenant, params.max_tokens) * params.num_branches
        cost = self._cost.prompt_tokens(tenant, num_prompt) + output
        try:
            hold = await self._quotas.reserve(caller, cost)
        except NotAdmittedError as error:
            error.tell_queue(self._queue.num_requests)
            raise
        try:
            self._queue.check(caller, num_prompt, deadline_s=deadline_s)
        except BaseException:
            hold.cancel()
            raise
        return Reservation(
            caller,
            hold=hold,
            cost=self._cost,
            queue=self._queue,
            waiting=self._queue.enter(caller, num_prompt),
        )

    @property
    def num_waiting(self) -> int:
        """Requests in the engine's queue, as far as this gateway knows."""
        return self._queue.num_requests

    def headers(self, caller: Caller) -> dict[str, str]:
        """What is left of a caller's limits, for any answer; empty without limits."""
        return rate_limit_headers(caller.limits, self._quotas.levels(caller))


@dataclass(slots=True)
class _Habit:
    cached_share: float = 0.0
    output_tokens: float = _FIRST_OUTPUT


class ExpectedCost:
    """What a request will probably take: uncached prompt tokens, and as much output as is usual.

    Means by tenant, learned from requests that ended; at first every prompt counts whole, and
    output as far as it may go, up to a guess.
    """

    def __init__(self) -> None:
        self._habits: dict[str, _Habit] = {}

    def prompt_tokens(self, tenant: str, num_prompt: int) -> float:
        """Those that will have to be computed."""
        habit = self._habits.get(tenant)
        return num_prompt * (1.0 - (0.0 if habit is None else habit.cached_share))

    def output_tokens(self, tenant: str, most: int) -> float:
        """Of one output that may have so many."""
        habit = self._habits.get(tenant)
        return min(most, _FIRST_OUTPUT if habit is None else habit.output_tokens)

    def learn(self, tenant: str, *, num_prompt: int, num_cached: int, output_tokens: float) -> None:
        """What a request of it took, its output as a mean over its branches."""
        habit = self._habits.setdefault(tenant, _Habit())
        habit.cached_share += _WEIGHT * (num_cached / max(num_prompt, 1) - habit.cached_share)
        habit.output_tokens += _WEIGHT * (output_tokens - habit.output_tokens)
