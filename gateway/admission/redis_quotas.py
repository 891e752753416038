"""Tenants' limits in Redis, shared by all gateways.

    penstock:{quota:<tenant>}:buckets    what is used of the buckets
    penstock:{quota:<tenant>}:running    running requests, each with a lease

One script reserves, so a reservation is complete or absent; a task sends returns in batches. The
requests of a gateway that died expire with their leases. While Redis, or a cluster's node, is
unavailable, this gateway grants its own share of the limits kept there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files

from penstock.gateway.admission.quotas import (
    CONCURRENCY_RETRY_S,
    NO_HOLD,
    Hold,
    LocalQuotas,
)
from penstock.gateway.admission.refusals import Levels, full_levels, quota_exceeded
from penstock.gateway.auth.callers import NO_LIMITS, Caller, TenantLimits
from penstock.gateway.storage.conversations.store import StoreUnavailableError, UnreadableDataError
from penstock.gateway.storage.redis.cluster import node_name
from penstock.gateway.storage.redis.link import RedisLink, Script

_LOG = logging.getLogger(__name__)
_SCRIPT = Script(
    files("penstock.gateway.admission").joinpath("buckets.lua").read_text(encoding="utf-8")
)
_AWAY_S = 1.0  # after a failure, until Redis is tried again
_MAX_OWED = 10_000  # returns that are kept while Redis is unavailable
DEFAULT_LEASE_S = 60.0


@dataclass(frozen=True, slots=True)
class _Owed:
    """A return that Redis has not been told yet."""

    caller: Caller
    hold_id: str
    num_tokens: float
    num_requests: int = 0


class RedisQuotas:
    """`Quotas` of all gateways of one Redis.

    Args:
        fallback: grants this gateway's share while Redis is unavailable.
        lease_s: after which the reservations of a gateway that is not heard from expire.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        link: RedisLink,
        fallback: LocalQuotas,
        *,
        lease_s: float = DEFAULT_LEASE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._link = link
        self._fallback = fallback
        self._lease_s = lease_s
        self._clock = clock
        self._away_until_s = defaultdict[str, float](float)  # by node
        self._levels: dict[str, Levels] = {}  # by tenant, as Redis reported them last
        self._held: defaultdict[str, set[str]] = defaultdict(set)  # by tenant
        self._owed: deque[_Owed] = deque(maxlen=_MAX_OWED)
        self._wake = asyncio.Event()
        self._is_closing = False
        self._keeper: asyncio.Task[None] | None = None

    async def reserve(self, caller: Caller, num_tokens: float) -> Hold:
        limits = caller.limits
        if limits == NO_LIMITS:
            return NO_HOLD
        if self._is_away(caller.tenant):
            return self._fallback.reserve_now(caller, num_tokens)
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._keep(), name="redis-quotas")
        hold_id = secrets.token_hex(8)
        try:
            reply = await self._run(
                caller.tenant,
                "reserve",
                hold_id,
                num_tokens,
                round(self._lease_s * 1e3),
                limits.requests_per_minute or 0,
                limits.tokens_per_minute or 0,
                limits.max_concurrent_requests or 0,
            )
        except BaseException as error:
            # Redis may have granted it although its answer was lost or the caller has left.
            self.give_back(_Owed(caller, hold_id, num_tokens, 1))
            if isinstance(error, StoreUnavailableError):
                self._note_away(caller.tenant)
            elif not isinstance(error, UnreadableDataError):  # of this tenant alone
                raise
            return self._fallback.reserve_now(caller, num_tokens)
        levels = self._levels[caller.tenant] = _levels(limits, reply)
        if not int(reply[0]):
            raise quota_exceeded(limits, levels, _waits(limits, levels, num_tokens))
        self._held[caller.tenant].add(hold_id)
        return _RedisHold(self, caller, hold_id, num_tokens)

    def levels(self, caller: Caller) -> Levels:
        if self._is_away(caller.tenant):
            return self._fallback.levels(caller)
        return self._levels.get(caller.tenant) or full_levels(caller.limits)

    def give_back(self, owed: _Owed) -> None:
        """Queue a return for the task that sends them."""
        self._held[owed.caller.tenant].discard(owed.hold_id)
        self._owed.append(owed)
        self._wake.set()

    async def aclose(self) -> None:
        """Send the outstanding returns, then stop."""
        self._is_closing = True
        self._wake.set()
        if self._keeper is not None:
            # Not cancelled at once: redis-py can lose a cancellation that coincides with a reply.
            await asyncio.wait({self._keeper}, timeout=_AWAY_S)
            self._keeper.cancel()

    async def _keep(self) -> None:
        renew_at_s = self._clock() + self._lease_s / 3
        while True:
            self._wake.clear()
            try:
                await self._send_owed()
                if self._clock() >= renew_at_s:
                    renew_at_s = self._clock() + self._lease_s / 3
                    await self._renew()
            except Exception:
                _LOG.exception("updating the tenants' limits in Redis failed")
                self._owed.clear()
            if self._is_closing:
                return
            # What could not be sent is tried again a little later.
            wait_s = _AWAY_S if self._owed else max(renew_at_s - self._clock(), 0.0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()

    async def _send_owed(self) -> None:
        """Send the returns to the nodes that are available."""
        for owed in list(self._owed):
            tenant, limits = owed.caller.tenant, owed.caller.limits
            if self._is_away(tenant):
                continue
            try:
                await self._run(
                    tenant,
                    "settle",
                    owed.hold_id,
                    owed.num_requests,
                    owed.num_tokens,
                    limits.requests_per_minute or 0,
                    limits.tokens_per_minute or 0,
                )
            except StoreUnavailableError:  # the link has logged it
                self._note_away(tenant)
                continue
            except UnreadableDataError:  # so nothing is kept there that could be returned
                pass
            with contextlib.suppress(ValueError):  # dropped: the deque was full
                self._owed.remove(owed)

    async def _renew(self) -> None:
        for tenant, hold_ids in list(self._held.items()):
            if not hold_ids:
                del self._held[tenant]
                continue
            # The link has logged it.
            with contextlib.suppress(StoreUnavailableError, UnreadableDataError):
                await self._run(tenant, "renew", round(self._lease_s * 1e3), *hold_ids)

    def _is_away(self, tenant: str) -> bool:
        return self._clock() < self._away_until_s[self._node(tenant)]

    def _note_away(self, tenant: str) -> None:
        self._away_until_s[self._node(tenant)] = self._clock() + _AWAY_S

    def _node(self, tenant: str) -> str:
        return node_name(self._link.client, f"{{quota:{tenant}}}")

    async def _run(self, tenant: str, *args: str | float) -> list[bytes]:
        keys = [f"penstock:{{quota:{tenant}}}:{name}" for name in ("buckets", "running")]
        reply: list[bytes] = await self._link.run(_SCRIPT, keys, args)
        return reply


class _RedisHold:
    def __init__(
        self, quotas: RedisQuotas, caller: Caller, hold_id: str, num_tokens: float
    ) -> None:
        self._quotas = quotas
        self._caller = caller
        self._hold_id = hold_id
        self._num_tokens = num_tokens

    def release(self, num_tokens: float) -> None:
        unused = self._num_tokens - num_tokens
        self._quotas.give_back(_Owed(self._caller, self._hold_id, unused))

    def cancel(self) -> None:
        self._quotas.give_back(_Owed(self._caller, self._hold_id, self._num_tokens, 1))


def _levels(limits: TenantLimits, reply: list[bytes]) -> Levels:
    _, requests, tokens, num_running = reply
    return Levels(
        requests=_left(limits.requests_per_minute, requests),
        tokens=_left(limits.tokens_per_minute, tokens),
        num_running=int(num_running),
    )


def _left(limit: float | None, used: bytes) -> float:
    return math.inf if limit is None else limit - float(used)


def _waits(limits: TenantLimits, levels: Levels, num_tokens: float) -> dict[str, float]:
    """Seconds until each limit would admit the request."""
    at_once = limits.max_concurrent_requests
    return {
        "requests per minute": _wait_s(limits.requests_per_minute, levels.requests, 1.0),
        "tokens per minute": _wait_s(limits.tokens_per_minute, levels.tokens, num_tokens),
        "concurrent requests": (
            CONCURRENCY_RETRY_S if at_once is not None and levels.num_running >= at_once else 0.0
        ),
    }


def _wait_s(limit: float | None, level: float, amount: float) -> float:
    if limit is None:
        return 0.0
    return max(0.0, min(amount, limit) - level) * 60.0 / limit
