"""The queue in front of the engine as this gateway sees it: how long it is, whose, how fast.

What this gateway sent and has heard nothing of is known exactly; what others sent, from the
engine's stats, which are a moment old. The longer of both counts, and of what others sent each
tenant is taken to have the part that it has here.

Predicted time to first token = tokens ahead ÷ the rate at which the queue drains + the request's
own prompt ÷ the rate of prefill. The engine is fair between tenants, so no more than its share is
ahead of a tenant, however long another's backlog is. Queued prompts are counted whole, and so is
what leaves the queue: the part that is cached falls out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from penstock.engine.transport.messages import EngineStats
from penstock.gateway.admission.refusals import overloaded
from penstock.gateway.auth.callers import Caller

_REQUEST_BYTES = 4096  # of what a waiting request keeps in memory, beside its tokens
_TOKEN_BYTES = 40
_UNKNOWN_WAIT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueBounds:
    """Beyond these, new requests are refused; but a tenant may always fill its own share.

    Attributes:
        max_bytes: of memory, as estimated.
        max_age_s: of a tenant's oldest waiting request.
        deadline_s: for a first token, where the caller names none; None: any wait will do.
    """

    max_requests: int = 4096
    max_tokens: int = 16 << 20
    max_bytes: int = 1 << 30
    max_age_s: float = 600.0
    deadline_s: float | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Waiting:
    """One request that the engine has not begun."""

    tenant: str
    num_tokens: int
    since_s: float


@dataclass(slots=True)
class _Line:
    """A tenant's, in order of arrival."""

    weight: float
    requests: dict[int, Waiting] = field(default_factory=dict)
    num_tokens: int = 0


class HasStats(Protocol):
    @property
    def stats(self) -> EngineStats:
        """The newest."""
        ...


class EngineQueue:
    """
    Args:
        engine: whose newest stats count.
        clock: seconds that only grow.
    """

    def __init__(
        self, bounds: QueueBounds, *, engine: HasStats, clock: Callable[[], float]
    ) -> None:
        self._bounds = bounds
        self._engine = engine
        self._clock = clock
        self._lines: dict[str, _Line] = {}  # of tenants that wait
        self._num_requests = 0
        self._num_tokens = 0

    def check(self, caller: Caller, num_tokens: int, *, deadline_s: float | None) -> None:
        """Whether one more may wait.

        Args:
            num_tokens: of its prompt.
            deadline_s: for its first token; None: the configured one.

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
        """One more waits."""
        waiting = Waiting(tenant=caller.tenant, num_tokens=num_tokens, since_s=self._clock())
        line = self._lines.setdefault(caller.tenant, _Line(caller.weight))
        line.weight = caller.weight
        line.requests[id(waiting)] = waiting
        line.num_tokens += num_tokens
        self._num_requests += 1
        self._num_tokens += num_tokens
        return waiting

    def leave(self, waiting: Waiting) -> None:
        """The engine has begun it, or it has gone; once."""
        line = self._lines[waiting.tenant]
        del line.requests[id(waiting)]
        line.num_tokens -= waiting.num_tokens
        self._num_requests -= 1
        self._num_tokens -= waiting.num_tokens
        if not line.requests:
            del self._lines[waiting.tenant]

    def wait_s(self, caller: Caller, num_tokens: int) -> float:
        """Until the engine begins a request of this caller, as predicted; 0 if nothing is known."""
        line = self._lines.get(caller.tenant) or _Line(caller.weight)
        seen = self._engine.stats.num_tokens_waiting
        own = _everywhere(line.num_tokens, num_tokens, here=self._num_tokens, seen=seen)
        fair = own / self._share(caller) - num_tokens
        return self.drain_s(min(fair, max(self._num_tokens, seen)))

    def drain_s(self, num_tokens: float) -> float:
        """Until so many queued tokens are no more; 0 if no rate is known."""
        stats = self._engine.stats
        # While nobody waits for a place, only computing the prompts takes time.
        has_places = stats.num_requests_waiting == 0
        rate = (0.0 if has_places else stats.queue_tokens_per_s) or stats.prefill_tokens_per_s
        return num_tokens / rate if rate > 0 else 0.0

    @property
    def num_requests(self) -> int:
        return max(self._num_requests, self._engine.stats.num_requests_waiting)

    def _over_bounds(self, caller: Caller, num_tokens: int) -> str | None:
        bounds, share, stats = self._bounds, self._share(caller), self._engine.stats
        line = self._lines.get(caller.tenant) or _Line(caller.weight)
        # what: the bound, the new one's, its tenant's, this gateway's, the engine's
        measures = {
            "requests": (
                bounds.max_requests, 1, len(line.requests), self._num_requests,
                stats.num_requests_waiting,
            ),
            "prompt tokens": (
                bounds.max_tokens, num_tokens, line.num_tokens, self._num_tokens,
                stats.num_tokens_waiting,
            ),
            "bytes": (
                bounds.max_bytes, _num_bytes(1, num_tokens),
                _num_bytes(len(line.requests), line.num_tokens),
                _num_bytes(self._num_requests, self._num_tokens),
                _num_bytes(stats.num_requests_waiting, stats.num_tokens_waiting),
            ),
        }  # fmt: skip
        for what, (most, new, own, here, seen) in measures.items():
            total = max(here, seen)
            is_over = total > 0 and total + new > most  # an empty queue takes what fits the model
            if is_over and _everywhere(own, new, here=here, seen=seen) > most * share:
                return f"{total} of {most} {what} are waiting"
        oldest = next(iter(line.requests.values()), None)
        if oldest is not None and self._clock() - oldest.since_s > bounds.max_age_s:
            return f"your oldest request has been waiting for more than {bounds.max_age_s:g} s"
        return None

    def _share(self, caller: Caller) -> float:
        """Of the engine, among those that wait here now and this one."""
        others = sum(line.weight for name, line in self._lines.items() if name != caller.tenant)
        return caller.weight / (others + caller.weight)

    def _prefill_s(self, num_tokens: int) -> float:
        rate = self._engine.stats.prefill_tokens_per_s
        return num_tokens / rate if rate > 0 else 0.0

    def _refusal(self, message: str, wait_s: float) -> Exception:
        return overloaded(message, wait_s=wait_s, num_queued=self.num_requests)


def _everywhere(own: int, new: int, *, here: int, seen: int) -> float:
    """What a tenant has with a new request in all gateways, if the part of it is the same."""
    return (own + new) * max(1.0, (seen + new) / (here + new))


def _num_bytes(num_requests: int, num_tokens: int) -> int:
    return num_requests * _REQUEST_BYTES + num_tokens * _TOKEN_BYTES
