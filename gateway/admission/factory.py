"""Admission as the settings ask for it.

The Redis client is imported only where there is a `--redis-url`.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.gateway.admission.admission import Admission
from penstock.gateway.admission.engine_queue import EngineQueue, QueueBounds
from penstock.gateway.admission.quotas import LocalQuotas, Quotas
from penstock.gateway.config import GatewayConfig
from penstock.gateway.engine_client import EngineClient
from penstock.gateway.key_ring import KeyRing
from penstock.gateway.tickets import MemoryTickets, Tickets

_TIMEOUT_S = 0.25  # of Redis, before a request that waits for it is decided without


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """Everything that decides who comes in."""

    keys: KeyRing
    tickets: Tickets
    admission: Admission
    aclose: Callable[[], Awaitable[None]]


def make_gate(config: GatewayConfig, engine: EngineClient) -> Gate:
    """
    Raises:
        ConfigError: the key file or `--redis-url` makes no sense.
    """
    quotas, tickets, aclose = _shared(config)
    bounds = QueueBounds(
        max_requests=config.max_queue_requests,
        max_tokens=config.max_queue_tokens,
        deadline_s=_seconds(config.request_deadline_ms),
    )
    queue = EngineQueue(bounds, stats=lambda: engine.stats, clock=time.monotonic)
    file = config.api_keys_file
    return Gate(
        keys=KeyRing(config.api_keys, None if file is None else Path(file)),
        tickets=tickets,
        admission=Admission(quotas, queue),
        aclose=aclose,
    )


_Shared = tuple[Quotas, Tickets, Callable[[], Awaitable[None]]]


def _shared(config: GatewayConfig) -> _Shared:
    """What all gateways have in common."""
    if config.redis_url is None:
        return LocalQuotas(time.monotonic), MemoryTickets(), _nothing
    from penstock.gateway.admission.redis_buckets import RedisQuotas
    from penstock.gateway.admission.redis_tickets import RedisTickets
    from penstock.gateway.redis_link import RedisLink
    from penstock.gateway.redis_url import RedisAddress

    link = RedisLink(RedisAddress.parse(config.redis_url), timeout_s=_TIMEOUT_S)
    fallback = LocalQuotas(time.monotonic, share=1.0 / config.num_workers)
    quotas = RedisQuotas(link, fallback)

    async def aclose() -> None:
        await quotas.aclose()
        await link.aclose()

    return quotas, RedisTickets(link), aclose


async def _nothing() -> None:
    """There is nothing to close."""


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3
