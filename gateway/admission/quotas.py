"""Each tenant's own limits: requests and tokens per minute, and concurrent requests.

A request's cost is reserved completely or not at all. When the request ends, unused tokens are
returned, and excess tokens become a debt. `redis_quotas` does the same for many gateways.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from penstock.gateway.admission.refusals import Levels, full_levels, quota_exceeded
from penstock.gateway.auth.callers import Caller, TenantLimits

CONCURRENCY_RETRY_S = 1.0  # it is unknown when one of the tenant's requests will end
_EPSILON = 1e-6  # rounding error of a client that waits exactly as long as it was told


class Hold(Protocol):
    """What one request has reserved. Either `release` or `cancel` is called, once."""

    def release(self, num_tokens: float) -> None:
        """The request has ended and used this many tokens."""
        ...

    def cancel(self) -> None:
        """The request was not admitted after all: it costs nothing."""
        ...


class Quotas(Protocol):
    async def reserve(self, caller: Caller, num_tokens: float) -> Hold:
        """Reserve one request and its tokens.

        Raises:
            RequestRefusedError: 429 `rate_limit_exceeded`; nothing was reserved.
        """
        ...

    def levels(self, caller: Caller) -> Levels:
        """What is left, as far as this gateway knows."""
        ...


class NoHold:
    """The hold of a tenant without limits."""

    def release(self, num_tokens: float) -> None:
        """Nothing was reserved."""

    def cancel(self) -> None:
        """Nothing was reserved."""


NO_HOLD = NoHold()


@dataclass(slots=True)
class _Account:
    requests: TokenBucket | None = None
    tokens: TokenBucket | None = None
    num_running: int = 0


class LocalQuotas:
    """Limits that this process keeps alone.

    Args:
        share: the fraction of every limit that this process may grant.
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float], *, share: float = 1.0) -> None:
        self._clock = clock
        self._share = share
        self._accounts: dict[str, _Account] = {}  # as many as the key file has tenants

    async def reserve(self, caller: Caller, num_tokens: float) -> Hold:
        return self.reserve_now(caller, num_tokens)

    def reserve_now(self, caller: Caller, num_tokens: float) -> Hold:
        """`reserve` without awaiting."""
        limits, now_s = self._limits(caller.limits), self._clock()
        if limits == TenantLimits():
            return NO_HOLD
        account = self._account(caller.tenant, limits, now_s)
        waits = {
            "requests per minute": _wait_s(account.requests, 1.0, now_s),
            "tokens per minute": _wait_s(account.tokens, num_tokens, now_s),
            "concurrent requests": _concurrency_wait_s(limits, account.num_running),
        }
        if any(waits.values()):
            raise quota_exceeded(limits, self._levels(account, now_s), waits)
        if account.requests is not None:
            account.requests.take(1.0, now_s)
        if account.tokens is not None:
            account.tokens.take(num_tokens, now_s)
        account.num_running += 1
        return _LocalHold(self, account, num_tokens)

    def levels(self, caller: Caller) -> Levels:
        account = self._accounts.get(caller.tenant)
        if account is None:
            return full_levels(self._limits(caller.limits))
        return self._levels(account, self._clock())

    def give_back(self, account: _Account, num_tokens: float, num_requests: float) -> None:
        """Return tokens and requests of a request that has ended."""
        account.num_running -= 1
        if account.tokens is not None:
            account.tokens.take(-num_tokens, self._clock())
        if account.requests is not None:
            account.requests.take(-num_requests, self._clock())

    def _levels(self, account: _Account, now_s: float) -> Levels:
        return Levels(
            requests=math.inf if account.requests is None else account.requests.level(now_s),
            tokens=math.inf if account.tokens is None else account.tokens.level(now_s),
            num_running=account.num_running,
        )

    def _account(self, tenant: str, limits: TenantLimits, now_s: float) -> _Account:
        account = self._accounts.setdefault(tenant, _Account())
        account.requests = _fitting(account.requests, limits.requests_per_minute, now_s)
        account.tokens = _fitting(account.tokens, limits.tokens_per_minute, now_s)
        return account

    def _limits(self, limits: TenantLimits) -> TenantLimits:
        if self._share == 1.0 or limits == TenantLimits():
            return limits
        at_once = limits.max_concurrent_requests
        return TenantLimits(
            requests_per_minute=_times(limits.requests_per_minute, self._share),
            tokens_per_minute=_times(limits.tokens_per_minute, self._share),
            max_concurrent_requests=None if at_once is None else max(1, int(at_once * self._share)),
        )


class _LocalHold:
    def __init__(self, quotas: LocalQuotas, account: _Account, num_tokens: float) -> None:
        self._quotas = quotas
        self._account = account
        self._num_tokens = num_tokens

    def release(self, num_tokens: float) -> None:
        self._quotas.give_back(self._account, self._num_tokens - num_tokens, 0.0)

    def cancel(self) -> None:
        self._quotas.give_back(self._account, self._num_tokens, 1.0)


def _fitting(bucket: TokenBucket | None, limit: float | None, now_s: float) -> TokenBucket | None:
    """The bucket of a limit, resized if the limit has changed."""
    if limit is None or bucket is None:
        return None if limit is None else TokenBucket(limit, now_s)
    if bucket.capacity != limit:
        bucket.resize(limit, now_s)
    return bucket


def _wait_s(bucket: TokenBucket | None, amount: float, now_s: float) -> float:
    return 0.0 if bucket is None else bucket.wait_s(amount, now_s)


def _concurrency_wait_s(limits: TenantLimits, num_running: int) -> float:
    limit = limits.max_concurrent_requests
    return 0.0 if limit is None or num_running < limit else CONCURRENCY_RETRY_S


def _times(limit: float | None, share: float) -> float | None:
    return None if limit is None else limit * share


class TokenBucket:
    """A token bucket: a limit per minute that allows bursts of a minute's worth.

    Pure; the time is an argument. It starts full. More may be taken than was asked for, so its
    level may be negative.

    Args:
        per_minute: its capacity, and the refill per minute.
    """

    def __init__(self, per_minute: float, now_s: float) -> None:
        self.capacity = per_minute
        self._level = per_minute
        self._at_s = now_s

    def level(self, now_s: float) -> float:
        self._level += max(0.0, now_s - self._at_s) * self.capacity / 60.0
        self._level = min(self._level, self.capacity)
        self._at_s = max(now_s, self._at_s)
        return self._level

    def wait_s(self, amount: float, now_s: float) -> float:
        """Seconds until `amount` is available; for more than a full bucket, until it is full."""
        missing = min(amount, self.capacity) - self.level(now_s)
        return missing * 60.0 / self.capacity if missing > _EPSILON else 0.0

    def take(self, amount: float, now_s: float) -> None:
        """Take `amount`; a negative amount is returned."""
        self._level = min(self.level(now_s) - amount, self.capacity)

    def resize(self, per_minute: float, now_s: float) -> None:
        """Set a new limit and keep the amount used."""
        used = self.capacity - self.level(now_s)
        self.capacity = per_minute
        self._level = per_minute - used
