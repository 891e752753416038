"""Quotas in memory and in Redis, and who asks for a share of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

import pytest
import redis

from penstock.gateway.admission.quotas import LocalQuotas, Quotas
from penstock.gateway.admission.redis_quotas import RedisQuotas
from penstock.gateway.admission.refusals import MAX_RETRY_S, NotAdmittedError
from penstock.gateway.auth.callers import Caller, TenantLimits
from penstock.gateway.storage.redis.link import RedisLink
from penstock.gateway.storage.redis.url import RedisAddress

from ..conftest import PATIENCE_S, until

LEASE_S = 60.0


def caller(tenant: str = "acme", **limits: float) -> Caller:
    return Caller(tenant=tenant, limits=TenantLimits(**limits))  # type: ignore[arg-type]


class Bed(Protocol):
    def quotas(self) -> Quotas: ...

    async def settled(self) -> None: ...


class LocalBed:
    def __init__(self) -> None:
        self.now_s = 0.0

    def quotas(self) -> Quotas:
        return LocalQuotas(lambda: self.now_s)

    async def settled(self) -> None:
        """At once."""


class RedisBed:
    def __init__(self, url: str) -> None:
        self.url = url
        self.links: list[RedisLink] = []
        self.made: list[RedisQuotas] = []

    def quotas(self, *, clock: Callable[[], float] = time.monotonic) -> RedisQuotas:
        link = RedisLink(RedisAddress.parse(self.url), timeout_s=PATIENCE_S)
        fallback = LocalQuotas(asyncio.get_running_loop().time, share=0.5)
        quotas = RedisQuotas(link, fallback, lease_s=LEASE_S, clock=clock)
        self.links.append(link)
        self.made.append(quotas)
        return quotas

    async def settled(self) -> None:
        await until(lambda: not any(quotas._owed for quotas in self.made))

    def leases(self, who: Caller, *, passed_s: float = 0.0) -> list[float]:
        """When they end, on Redis' clock in s, after so much of them has passed."""
        key = f"penstock:{{quota:{who.tenant}}}:running"
        with redis.Redis.from_url(self.url) as client:
            for hold in client.zrange(key, 0, -1):
                client.zincrby(key, -1e3 * passed_s, hold)
            return [score / 1e3 for _, score in client.zrange(key, 0, -1, withscores=True)]

    async def aclose(self) -> None:
        for quotas, link in zip(self.made, self.links, strict=True):
            await quotas.aclose()
            await link.aclose()


async def refused(quotas: Quotas, who: Caller, num_tokens: float = 1) -> NotAdmittedError:
    with pytest.raises(NotAdmittedError) as caught:
        await quotas.reserve(who, num_tokens)
    assert caught.value.status == 429
    assert caught.value.code == "rate_limit_exceeded"
    assert 0 < float(caught.value.headers["Retry-After"]) <= MAX_RETRY_S
    assert 0 < float(caught.value.headers["retry-after-ms"]) <= 1e3 * MAX_RETRY_S
    return caught.value
