"""This gateway's estimate of the engine's queue: its length, by tenant, and how fast it drains.

Requests that this gateway sent and that have no output yet are known exactly. Requests of other
gateways are known from the engine's stats, which are a moment old. The larger number counts, and a
tenant's share of the others' requests is assumed to be the same as here.

Predicted time to first token = tokens ahead ÷ the queue's drain rate + the request's own prompt ÷
the prefill rate. The engine is fair between tenants, so a tenant waits for no more than its fair
share, however long another's backlog is. Queued prompts count whole, and so do prompts that leave
the queue, so the cached part cancels out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from penstock.engine.protocol.messages import EngineStats
from penstock.gateway.admission.refusals import overloaded
from penstock.gateway.auth.callers import Caller

_REQUEST_BYTES = 4096  # memory of a waiting request without its tokens
_TOKEN_BYTES = 40
_UNKNOWN_WAIT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueBounds:
    """Beyond these bounds new requests are refused, but a tenant may always fill its own share.

    Attributes:
        max_bytes: estimated memory.
        max_age_s: age of a tenant's oldest waiting request.
        deadline_s: for the first token, where the caller sets none; None: no deadline.
    """

    max_requests: int = 4096
    max_tokens: int = 16 << 20
    max_bytes: int = 1 << 30
    max_age_s: float = 600.0
    deadline_s: float | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Waiting:
    """A request that the engine has not begun."""

    tenant: str
    num_tokens: int
    since_s: float


@dataclass(slots=True)
class _TenantQueue:
    """A tenant's waiting requests, in order of arrival."""

    weight: float
    requests: dict[int, Waiting] = field(default_factory=dict)
    num_tokens: int = 0


class HasStats(Protocol):
    @property
    def stats(self) -> EngineStats:
        """The newest stats, of all engines together."""
        ...

    @property
    def num_engines(self) -> int:
        """Engines that take requests; at least 1."""
        ...


class EngineQueue:
    """
    Args:
        engine: provides the stats.
        clock: monotonic seconds.
    """

    def __init__(
        self, bounds: QueueBounds, *, engine: HasStats, clock: Callable[[], float]
    ) -> None:
        self._bounds = bounds
        self._engine = engine
        self._clock = clock
        self._tenants: dict[str, _TenantQueue] = {}  # only those with waiting requests
        self._num_requests = 0
        self._num_tokens = 0

    def check(self, caller: Caller, num_tokens: int, *, deadline_s: float | None) -> None:
        """Check whether one more request may wait.

        Args:
            num_tokens: of the prompt.
            deadline_s: for the first token; None: the configured one.

        Raises:
            RequestRefusedError: 503 `server_overloaded`.
        """
        wait_s = self.wait_s(caller, num_tokens)
        reason = self._over_bounds(caller, num_tokens)
        if reason is not None:
            raise self._refusal(f"the queue is full: {reason}", wait_s or _UNKNOWN_WAIT_S)
        deadline_s = self._bounds.deadline_s if deadline_s is None else deadline_s
        ttft_s = wait_s + self._prefill_s(num_tokens)
        if deadline_s is not None and ttft_s > deadline_s:
            raise self._refusal(
                f"the first token is expected in {ttft_s:.1f} s, later than the deadline of "
                f"{deadline_s:g} s",
                max(ttft_s - deadline_s, 0.0),
            )

    def enter(self, caller: Caller, num_tokens: int) -> Waiting:
        """Add a request to the queue."""
        waiting = Waiting(tenant=caller.tenant, num_tokens=num_tokens, since_s=self._clock())
        tenant = self._tenants.setdefault(caller.tenant, _TenantQueue(caller.weight))
        tenant.weight = caller.weight
        tenant.requests[id(waiting)] = waiting
        tenant.num_tokens += num_tokens
        self._num_requests += 1
        self._num_tokens += num_tokens
        return waiting

    def leave(self, waiting: Waiting) -> None:
        """Remove a request that the engine has begun or that has ended; call it once."""
        tenant = self._tenants[waiting.tenant]
        del tenant.requests[id(waiting)]
        tenant.num_tokens -= waiting.num_tokens
        self._num_requests -= 1
        self._num_tokens -= waiting.num_tokens
        if not tenant.requests:
            del self._tenants[waiting.tenant]

    def wait_s(self, caller: Caller, num_tokens: int) -> float:
        """Predicted seconds until the engine begins a request of this caller; 0 if unknown."""
        tenant = self._tenants.get(caller.tenant) or _TenantQueue(caller.weight)
        seen = self._engine.stats.num_tokens_waiting
        own = _everywhere(tenant.num_tokens, num_tokens, here=self._num_tokens, seen=seen)
        fair = own / self._share(caller) - num_tokens
        return self.drain_s(min(fair, max(self._num_tokens, seen)))

    def drain_s(self, num_tokens: float) -> float:
        """Predicted seconds until this many tokens have left the queue; 0 if no rate is known."""
        return self._engine.stats.drain_s(num_tokens)

    @property
    def num_requests(self) -> int:
        return max(self._num_requests, self._engine.stats.num_requests_waiting)

    def _over_bounds(self, caller: Caller, num_tokens: int) -> str | None:
        bounds, share, stats = self._bounds, self._share(caller), self._engine.stats
        tenant = self._tenants.get(caller.tenant) or _TenantQueue(caller.weight)
        # what is bounded: the bound; the new request's, tenant's, gateway's and engine's amount
        measures = {
            "requests": (
                bounds.max_requests, 1, len(tenant.requests), self._num_requests,
                stats.num_requests_waiting,
            ),
            "prompt tokens": (
                bounds.max_tokens, num_tokens, tenant.num_tokens, self._num_tokens,
                stats.num_tokens_waiting,
            ),
            "bytes": (
                bounds.max_bytes, _num_bytes(1, num_tokens),
                _num_bytes(len(tenant.requests), tenant.num_tokens),
                _num_bytes(self._num_requests, self._num_tokens),
                _num_bytes(stats.num_requests_waiting, stats.num_tokens_waiting),
            ),
        }  # fmt: skip
        for what, (bound, new, own, here, seen) in measures.items():
            total = max(here, seen)
            is_over = total > 0 and total + new > bound  # an empty queue accepts any request
            if is_over and _everywhere(own, new, here=here, seen=seen) > bound * share:
                return f"{total} of {bound} {what} are waiting"
        oldest = next(iter(tenant.requests.values()), None)
        if oldest is not None and self._clock() - oldest.since_s > bounds.max_age_s:
            return f"your oldest request has been waiting for more than {bounds.max_age_s:g} s"
        return None

    def _share(self, caller: Caller) -> float:
        """The caller's share of the engine among the tenants that wait now and itself."""
        others = sum(
            tenant.weight for name, tenant in self._tenants.items() if name != caller.tenant
        )
        return caller.weight / (others + caller.weight)

    def _prefill_s(self, num_tokens: float) -> float:
        # One of the engines computes it.
        rate = self._engine.stats.prefill_tokens_per_s / self._engine.num_engines
        return num_tokens / rate if rate > 0 else 0.0

    def _refusal(self, message: str, wait_s: float) -> Exception:
        return overloaded(message, wait_s=wait_s, num_queued=self.num_requests)


def _everywhere(own: int, new: int, *, here: int, seen: int) -> float:
    """A tenant's amount in all gateways with the new request, if its share is the same there."""
    return (own + new) * max(1.0, (seen + new) / (here + new))


def _num_bytes(num_requests: int, num_tokens: int) -> int:
    return num_requests * _REQUEST_BYTES + num_tokens * _TOKEN_BYTES
