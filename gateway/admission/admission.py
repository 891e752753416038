"""Admission control: decides whether a request may go to the engine.

    tenant's limits (429) → queue bounds (503) → predicted time to first token (503) → reservation

An admitted request holds its reservation until it ends in any way.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.engine.request import SamplingParams
from penstock.gateway.admission.engine_queue import EngineQueue, Waiting
from penstock.gateway.admission.quotas import NO_HOLD, Hold, Quotas
from penstock.gateway.admission.refusals import NotAdmittedError, rate_limit_headers
from penstock.gateway.auth.callers import ANYBODY, Caller

_FIRST_OUTPUT = 256.0  # tokens
_WEIGHT = 0.1  # of the newest request in the moving averages


class Reservation:
    """An admitted request's share of the tenant's limits, and its position in the queue.

    The owner calls `started` when the engine has begun the request and `release` when the request
    has ended. Only the first call of each counts.

    Attributes:
        expected_wait_s: until the engine begins it, from rates.
        num_new: tokens of its prompt that probably have to be computed.
    """

    __slots__ = (
        "_caller", "_cost", "_hold", "_queue", "_waiting", "expected_wait_s", "is_released",
        "num_new",
    )  # fmt: skip

    def __init__(
        self,
        caller: Caller = ANYBODY,
        *,
        hold: Hold = NO_HOLD,
        cost: ExpectedCost | None = None,
        queue: EngineQueue | None = None,
        waiting: Waiting | None = None,
        expected_wait_s: float = 0.0,
        num_new: float = 0.0,
    ) -> None:
        self.expected_wait_s = expected_wait_s
        self.num_new = num_new
        self._caller = caller
        self._hold = hold
        self._cost = cost
        self._queue = queue
        self._waiting = waiting
        self.is_released = False

    def started(self) -> None:
        """The request has left the queue."""
        waiting = self._waiting
        if waiting is not None and self._queue is not None:
            self._waiting = None
            self._queue.leave(waiting)

    def wait_s(self, num_tokens_ahead: int) -> float:
        """Predicted seconds until the engine has begun this many queued tokens; 0 if unknown."""
        return 0.0 if self._queue is None else self._queue.drain_s(num_tokens_ahead)

    def release(
        self,
        *,
        num_prompt: int = 0,
        num_cached: int = 0,
        num_output: int = 0,
        num_branches: int = 1,
    ) -> None:
        """The request has ended and used this many tokens; without output tokens it never ran."""
        if self.is_released:
            return
        self.is_released = True
        self.started()
        if num_output and self._cost is not None:
            self._cost.learn(
                self._caller.tenant,
                num_prompt=num_prompt,
                num_cached=num_cached,
                output_tokens=num_output / num_branches,
            )
        self._hold.release(num_prompt - num_cached + num_output)


class PartReservation(Reservation):
    """That of a request's first part, which runs before the rest of it."""

    __slots__ = ("_whole",)

    def __init__(self, whole: Reservation) -> None:
        super().__init__()
        self._whole = whole

    def started(self) -> None:
        self._whole.started()

    def wait_s(self, num_tokens_ahead: int) -> float:
        return self._whole.wait_s(num_tokens_ahead)


class Admission:
    """Admission control of one gateway."""

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
        """Admit a request.

        Args:
            num_prompt: number of prompt tokens.
            deadline_s: seconds from now within which the first token is wanted.

        Raises:
            RequestRefusedError: 429 for the tenant's own limits, 503 for the shared queue. Nothing
                is reserved then.
        """
        tenant = caller.tenant
        output = self._cost.output_tokens(tenant, params.max_tokens) * params.num_branches
        cost = self._cost.prompt_tokens(tenant, num_prompt) + output
        hold = await self._reserve(caller, cost)
        try:
            self._queue.check(caller, num_prompt, deadline_s=deadline_s)
        except BaseException:
            hold.cancel()
            raise
        expected_wait_s = self._queue.wait_s(caller, num_prompt)
        return Reservation(
            caller,
            hold=hold,
            cost=self._cost,
            queue=self._queue,
            waiting=self._queue.enter(caller, num_prompt),
            expected_wait_s=expected_wait_s,
            num_new=self._cost.prompt_tokens(tenant, num_prompt),
        )

    async def count(self, caller: Caller) -> None:
        """Count a request that the engine has nothing to do with, such as one that stores.

        Raises:
            RequestRefusedError: 429 for the tenant's own limits.
        """
        (await self._reserve(caller, 0.0)).release(0.0)

    async def _reserve(self, caller: Caller, num_tokens: float) -> Hold:
        try:
            return await self._quotas.reserve(caller, num_tokens)
        except NotAdmittedError as error:
            error.set_queue_length(self._queue.num_requests)
            raise

    @property
    def num_waiting(self) -> int:
        """Requests in the engine's queue, as this gateway estimates it."""
        return self._queue.num_requests

    def headers(self, caller: Caller) -> dict[str, str]:
        """Headers with what is left of a caller's limits; empty without limits."""
        return rate_limit_headers(caller.limits, self._quotas.levels(caller))


@dataclass(slots=True)
class _Averages:
    cached_share: float = 0.0
    output_tokens: float = _FIRST_OUTPUT


class ExpectedCost:
    """Predicts a request's cost: its uncached prompt tokens, and its output tokens.

    Moving averages by tenant, learned from requests that ended. At first nothing counts as cached,
    and the output counts as its limit, but at most 256 tokens.
    """

    def __init__(self) -> None:
        self._averages: dict[str, _Averages] = {}

    def prompt_tokens(self, tenant: str, num_prompt: int) -> float:
        """Prompt tokens that must be computed."""
        averages = self._averages.get(tenant)
        return num_prompt * (1.0 - (0.0 if averages is None else averages.cached_share))

    def output_tokens(self, tenant: str, limit: int) -> float:
        """Tokens of one output with this limit."""
        averages = self._averages.get(tenant)
        return min(limit, _FIRST_OUTPUT if averages is None else averages.output_tokens)

    def learn(self, tenant: str, *, num_prompt: int, num_cached: int, output_tokens: float) -> None:
        """A request has ended; `output_tokens` is the mean over its branches."""
        averages = self._averages.setdefault(tenant, _Averages())
        averages.cached_share += _WEIGHT * (num_cached / max(num_prompt, 1) - averages.cached_share)
        averages.output_tokens += _WEIGHT * (output_tokens - averages.output_tokens)
