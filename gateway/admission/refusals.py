"""Refusals: the reason, when to retry, and what is left of the tenant's limits.

    429 rate_limit_exceeded    the tenant's own limits   x-ratelimit-*, RateLimit, Retry-After
    503 server_overloaded      the queue is too long     Retry-After

Retry times are jittered, so that clients refused together do not return together.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from penstock.gateway.auth.callers import TenantLimits
from penstock.gateway.errors import RequestRefusedError, retry_headers

MAX_RETRY_S = 120.0
_MIN_RETRY_S = 0.1
_JITTER = 0.25  # of the wait plus one second: short waits must be spread too


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """What is left of a tenant's limits.

    Attributes:
        requests, tokens: in the buckets; negative for a debt, infinite without a limit.
        num_running: admitted requests that have not ended.
    """

    requests: float = math.inf
    tokens: float = math.inf
    num_running: int = 0


def full_levels(limits: TenantLimits) -> Levels:
    """The levels of a tenant that has used nothing."""
    requests, tokens = limits.requests_per_minute, limits.tokens_per_minute
    return Levels(
        requests=math.inf if requests is None else requests,
        tokens=math.inf if tokens is None else tokens,
    )


class NotAdmittedError(RequestRefusedError):
    """The request is refused now; the same request may be admitted later."""

    def __init__(
        self,
        message: str,
        *,
        status: int,
        code: str,
        wait_s: float,
        headers: Mapping[str, str] | None = None,
        num_queued: int = 0,
    ) -> None:
        super().__init__(message, code=code, status=status)
        self.headers = {**retry_headers(jittered(wait_s)), **(headers or {})}
        self._wait_ms = math.ceil(wait_s * 1e3)
        self.set_queue_length(num_queued)

    def set_queue_length(self, length: int) -> None:
        """Set the number of requests that wait for the engine."""
        self.details = {"estimated_wait_ms": self._wait_ms, "queue_length": length}


def jittered(wait_s: float) -> float:
    """`wait_s` plus some jitter, between 0.1 s and two minutes."""
    spread = _JITTER * (wait_s + 1.0)
    latest = MAX_RETRY_S * (1.0 - _JITTER / 2)
    late = max(min(wait_s, latest), _MIN_RETRY_S) + random.random() * spread  # noqa: S311
    return min(late, MAX_RETRY_S - random.random() * _JITTER * 10)  # noqa: S311


def quota_exceeded(
    limits: TenantLimits, levels: Levels, waits: Mapping[str, float]
) -> NotAdmittedError:
    """429, naming the limit with the longest wait.

    Args:
        waits: seconds until the request would fit, by limit.
    """
    name = max(waits, key=lambda each: waits[each])
    return NotAdmittedError(
        f"rate limit reached for {name}",
        status=429,
        code="rate_limit_exceeded",
        wait_s=waits[name],
        headers=rate_limit_headers(limits, levels),
    )


def overloaded(message: str, *, wait_s: float, num_queued: int) -> NotAdmittedError:
    """503: the server is too busy to promise an answer in time."""
    return NotAdmittedError(
        message, status=503, code="server_overloaded", wait_s=wait_s, num_queued=num_queued
    )


def rate_limit_headers(limits: TenantLimits, levels: Levels) -> dict[str, str]:
    """OpenAI's `x-ratelimit-*`, and the IETF draft's `RateLimit` and `RateLimit-Policy`."""
    headers: dict[str, str] = {}
    current, policies = [], []
    for name, limit, level in _per_minute(limits, levels):
        remaining = max(0, math.floor(level))
        reset_s = max(0.0, limit - level) * 60.0 / limit
        headers[f"x-ratelimit-limit-{name}"] = str(math.floor(limit))
        headers[f"x-ratelimit-remaining-{name}"] = str(remaining)
        headers[f"x-ratelimit-reset-{name}"] = _duration(reset_s)
        policies.append(f'"{name}";q={math.floor(limit)};w=60')
        current.append(f'"{name}";r={remaining};t={math.ceil(reset_s)}')
    if current:
        headers["RateLimit-Policy"] = ", ".join(policies)
        headers["RateLimit"] = ", ".join(current)
    return headers


def _per_minute(limits: TenantLimits, levels: Levels) -> Iterator[tuple[str, float, float]]:
    if limits.requests_per_minute is not None:
        yield "requests", limits.requests_per_minute, levels.requests
    if limits.tokens_per_minute is not None:
        yield "tokens", limits.tokens_per_minute, levels.tokens


def _duration(seconds: float) -> str:
    """In OpenAI's format: `120ms`, `7s`, `6m0s`."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1e3)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
