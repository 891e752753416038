"""Gateways' stores on one real Redis."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import redis

from penstock.gateway.storage.redis.link import RedisLink
from penstock.gateway.storage.redis.url import RedisAddress
from penstock.gateway.storage.response_log.log import ResponseLog
from penstock.gateway.storage.response_log.redis_settings import RedisLogSettings
from penstock.gateway.storage.response_log.redis_store import RedisLogStore

from ....redis_server import RedisServer
from .records import PATIENCE_S, add_delta, header, seen
from .stored import lapse, lease_key
from .wire import Wire

# Redis and gateways answer late on a busy machine: who waits for them here outlives a test's
# patience. Tests of Redis' absence make a gateway `impatient` while it lasts; those of a gateway's
# let its lease lapse.
_FOREVER_S = 4 * PATIENCE_S
PATIENT = RedisLogSettings(
    ack_timeout_s=_FOREVER_S,
    request_timeout_s=_FOREVER_S,
    outage_s=_FOREVER_S,
    hand_over_s=_FOREVER_S,
    lease_s=PATIENCE_S,
    beat_s=0.02,
)


@dataclass
class Owner:
    """Runs one response, as far as its log goes."""

    response_id: str = ""
    cancelled: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def cancel(self) -> None:
        self.cancelled.append(self.response_id)

    def lose(self) -> None:
        self.lost.append(self.response_id)

    def readers_changed(self) -> None:
        pass


@dataclass
class Gateway:
    """A gateway, as far as response logs go.

    Attributes:
        wire: its way to Redis, if it has one that can be stopped.
        carried_on: logs that it was given.
        cancelled: responses that somebody wanted stopped.
        lost: responses that another gateway has taken over.
    """

    store: RedisLogStore
    link: RedisLink
    settings: RedisLogSettings
    wire: Wire | None = None
    carried_on: dict[str, ResponseLog] = field(default_factory=dict)
    cancelled: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def run(self, log: ResponseLog) -> None:
        log.owner = Owner(log.header.response_id, self.cancelled, self.lost)

    def take_over(self, log: ResponseLog) -> None:
        self.run(log)
        self.carried_on[log.header.response_id] = log

    async def die(self, client: redis.Redis) -> None:
        """It ends without a word to the others, who see at once that it has no lease."""
        await self.store.close()
        await lapse(client, self.store)

    async def freeze(self, client: redis.Redis) -> None:
        """Nothing of it gets to Redis any more, until its wire goes on; the others see at once that
        it has no lease."""
        assert self.wire is not None
        self.wire.stop()
        await lapse(client, self.store)

    @contextlib.contextmanager
    def impatient(
        self, *, ack_timeout_s: float = 0.05, request_timeout_s: float = 0.2
    ) -> Iterator[None]:
        """It waits for Redis no longer than that."""
        settings = self.settings
        before = settings.ack_timeout_s, settings.request_timeout_s
        settings.ack_timeout_s, settings.request_timeout_s = ack_timeout_s, request_timeout_s
        try:
            yield
        finally:
            settings.ack_timeout_s, settings.request_timeout_s = before

    async def is_known(self) -> None:
        """Wait until the others can see that it lives."""
        async with asyncio.timeout(PATIENCE_S):
            while not await self.link.client.exists(lease_key(self.store)):  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def begin(gateway: Gateway, num_deltas: int = 0) -> ResponseLog:
    """A response that runs there, with so many deltas stored."""
    log = await gateway.store.create(header())
    gateway.run(log)
    for _ in range(num_deltas):
        add_delta(log)
    await seen(log, num_deltas)
    return log


class Gateways:
    """Makes gateways."""

    def __init__(self) -> None:
        self._made: list[Gateway] = []
        self._wires = contextlib.AsyncExitStack()

    async def make(
        self,
        url: str,
        settings: RedisLogSettings = PATIENT,
        *,
        is_wired: bool = False,
        clock: Callable[[], float] = time.monotonic,
        can_run: Callable[[], bool] = lambda: True,
    ) -> Gateway:
        """A gateway that has started.

        Args:
            is_wired: it goes to Redis over a `Wire`.
        """
        settings, wire = dataclasses.replace(settings), None
        address = RedisAddress.parse(url)
        if is_wired:
            ((_, port),) = address.hosts
            wire = await self._wires.enter_async_context(Wire(port))
            address = RedisAddress.parse(wire.url)
        link = RedisLink(address, timeout_s=_FOREVER_S)
        store = RedisLogStore(link.client, settings, clock=clock)
        gateway = Gateway(store, link, settings, wire)
        self._made.append(gateway)
        await store.start(gateway.take_over, can_run=can_run)
        await gateway.is_known()
        return gateway

    async def close(self) -> None:
        for gateway in self._made:
            if gateway.wire is not None:
                gateway.wire.go_on()
            await gateway.store.close()
            with contextlib.suppress(Exception):
                await gateway.link.aclose()
        self._made.clear()
        await self._wires.aclose()


@pytest.fixture
def client(redis_server: RedisServer) -> Iterator[redis.Redis]:
    """Looks into it from outside."""
    with redis_server.client() as made:
        yield made


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis of the test's own, to kill, stop and change. What is killed, and not the machine,
    loses nothing that it has answered."""
    with RedisServer(tmp_path / "redis", options={"appendfsync": "no"}) as server:
        yield server


@pytest.fixture
async def gateways() -> AsyncIterator[Gateways]:
    made = Gateways()
    try:
        yield made
    finally:
        await made.close()
