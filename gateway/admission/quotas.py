"""Each tenant's own limits: requests and tokens per minute, and requests at once.

All that a request costs is taken at once or not at all; when it ends, what it did not use is given
back, and what it used beyond is owed. `redis_buckets` does the same for many gateways.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from penstock.gateway.admission.refusals import quota_exceeded
from penstock.gateway.admission.token_bucket import TokenBucket
from penstock.gateway.callers import Caller, Limits

CONCURRENCY_RETRY_S = 1.0  # nobody knows when one of the tenant's own requests ends


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """What is left of a tenant's limits.

    Attributes:
        requests, tokens: in the buckets; below 0 a debt, infinite where there is no limit.
        num_running: requests that were admitted and have not ended.
    """

    requests: float = math.inf
    tokens: float = math.inf
    num_running: int = 0


class Hold(Protocol):
    """What one request has taken."""

    def settle(self, num_tokens: float) -> None:
        """It ended, having used so much. Either this or `cancel` is called, once."""
        ...

    def cancel(self) -> None:
        """It was not let in after all: it counts for nothing."""
        ...


class Quotas(Protocol):
    async def reserve(self, caller: Caller, num_tokens: float) -> Hold:
        """Take one request and its tokens.

        Raises:
            RequestRefusedError: 429 `rate_limit_exceeded`; nothing was taken.
        """
        ...

    def levels(self, caller: Caller) -> Levels:
        """As far as is known here."""
        ...


class NoHold:
    """Of a tenant without limits."""

    def settle(self, num_tokens: float) -> None:
        """Nothing was taken."""

    def cancel(self) -> None:
        """Nothing was taken."""


def full_levels(limits: Limits) -> Levels:
    """Of a tenant that has used nothing."""
    requests, tokens = limits.requests_per_minute, limits.tokens_per_minute
    return Levels(
        requests=math.inf if requests is None else requests,
        tokens=math.inf if tokens is None else tokens,
    )


NO_HOLD = NoHold()


@dataclass(slots=True)
class _Account:
    requests: TokenBucket | None = None
    tokens: TokenBucket | None = None
    num_running: int = 0


class LocalQuotas:
    """Limits kept by this process alone.

    Args:
        share: of every limit that is this process's to give.
        clock: seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float], *, share: float = 1.0) -> None:
        self._clock = clock
        self._share = share
        self._accounts: dict[str, _Account] = {}  # as many as the key file has tenants

    async def reserve(self, caller: Caller, num_tokens: float) -> Hold:
        return self.take(caller, num_tokens)

    def take(self, caller: Caller, num_tokens: float) -> Hold:
        """As `reserve`, at once."""
        limits, now_s = self._limits(caller.limits), self._clock()
        if limits == Limits():
            return NO_HOLD
        account = self._account(caller.tenant, limits, now_s)
        waits = {
            "requests per minute": _wait_s(account.requests, 1.0, now_s),
            "tokens per minute": _wait_s(account.tokens, num_tokens, now_s),
            "concurrent requests": _wait_for_place_s(limits, account.num_running),
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
        """Of one that runs no more."""
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

    def _account(self, tenant: str, limits: Limits, now_s: float) -> _Account:
        account = self._accounts.setdefault(tenant, _Account())
        account.requests = _fitting(account.requests, limits.requests_per_minute, now_s)
        account.tokens = _fitting(account.tokens, limits.tokens_per_minute, now_s)
        return account

    def _limits(self, limits: Limits) -> Limits:
        if self._share == 1.0 or limits == Limits():
            return limits
        at_once = limits.max_concurrent_requests
        return Limits(
            requests_per_minute=_times(limits.requests_per_minute, self._share),
            tokens_per_minute=_times(limits.tokens_per_minute, self._share),
            max_concurrent_requests=None if at_once is None else max(1, int(at_once * self._share)),
        )


class _LocalHold:
    def __init__(self, quotas: LocalQuotas, account: _Account, num_tokens: float) -> None:
        self._quotas = quotas
        self._account = account
        self._num_tokens = num_tokens

    def settle(self, num_tokens: float) -> None:
        self._quotas.give_back(self._account, self._num_tokens - num_tokens, 0.0)

    def cancel(self) -> None:
        self._quotas.give_back(self._account, self._num_tokens, 1.0)


def _fitting(bucket: TokenBucket | None, limit: float | None, now_s: float) -> TokenBucket | None:
    """The bucket of a limit, which may have changed since."""
    if limit is None or bucket is None:
        return None if limit is None else TokenBucket(limit, now_s)
    if bucket.capacity != limit:
        bucket.resize(limit, now_s)
    return bucket


def _wait_s(bucket: TokenBucket | None, amount: float, now_s: float) -> float:
    return 0.0 if bucket is None else bucket.wait_s(amount, now_s)


def _wait_for_place_s(limits: Limits, num_running: int) -> float:
    limit = limits.max_concurrent_requests
    return 0.0 if limit is None or num_running < limit else CONCURRENCY_RETRY_S


def _times(limit: float | None, share: float) -> float | None:
    return None if limit is None else limit * share
