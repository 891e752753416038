"""Gateways' stores on one real Redis."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from penstock.gateway.storage.redis_link import RedisAddress, RedisLink
from penstock.gateway.storage.response_log.log import ResponseLog
from penstock.gateway.storage.response_log.redis_store import RedisLogSettings, RedisLogStore
from penstock.gateway.storage.response_log.redis_stream import ask

from ....redis_server import RedisServer
from .records import PATIENCE_S, add_delta, header, seen

# Redis answers late on a busy machine: whoever waits for it here outlives a test's patience. Tests
# of its absence make a gateway `impatient` while it lasts.
_FOREVER_S = 4 * PATIENCE_S
PATIENT = RedisLogSettings(ack_timeout_s=_FOREVER_S, request_timeout_s=_FOREVER_S, lease_s=1.0)


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
        carried_on: logs that it was given.
        num_cancels: by response, how often somebody wanted it stopped.
    """

    store: RedisLogStore
    link: RedisLink
    carried_on: dict[str, ResponseLog] = field(default_factory=dict)
    cancelled: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def run(self, log: ResponseLog) -> None:
        log.owner = Owner(log.header.response_id, self.cancelled, self.lost)

    def take_over(self, log: ResponseLog) -> None:
        self.run(log)
        self.carried_on[log.header.response_id] = log

    async def die(self) -> None:
        """It stops as a process that was killed: nothing is tidied up."""
        tasks, self.store._tasks = set(self.store._tasks), []
        while tasks:  # redis-py waits in ways that may swallow a cancellation
            for task in tasks:
                task.cancel()
            _, tasks = await asyncio.wait(tasks, timeout=0.1)

    @contextlib.contextmanager
    def impatient(
        self, *, ack_timeout_s: float = 0.05, request_timeout_s: float = 0.2
    ) -> Iterator[None]:
        """It waits for Redis no longer than that."""
        writer, opener = self.store._writer, self.store._opener
        before = writer._ack_timeout_s, opener._timeout_s
        writer._ack_timeout_s, opener._timeout_s = ack_timeout_s, request_timeout_s
        try:
            yield
        finally:
            writer._ack_timeout_s, opener._timeout_s = before

    async def is_known(self) -> None:
        """Wait until the others can see that it lives."""
        lease = f"penstock:lease:{self.store.gateway_id}"
        async with asyncio.timeout(PATIENCE_S):
            while not await ask(self.link.client, "EXISTS", lease):  # noqa: ASYNC110
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

    async def make(self, url: str, settings: RedisLogSettings = PATIENT) -> Gateway:
        link = RedisLink(RedisAddress.parse(url), timeout_s=_FOREVER_S)
        gateway = Gateway(RedisLogStore(link.client, settings), link)
        self._made.append(gateway)
        await gateway.store.start(gateway.take_over)
        await gateway.is_known()
        return gateway

    async def close(self) -> None:
        for gateway in self._made:
            await gateway.store.close()
            with contextlib.suppress(Exception):
                await gateway.link.aclose()


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis") as server:
        yield server


@pytest.fixture
async def gateways() -> AsyncIterator[Gateways]:
    made = Gateways()
    try:
        yield made
    finally:
        await made.close()
