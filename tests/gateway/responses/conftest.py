"""Gateways' stores on one real Redis."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from penstock.gateway.redis_link import RedisAddress, RedisLink
from penstock.gateway.responses.log import ResponseLog
from penstock.gateway.responses.redis_log_store import RedisLogSettings, RedisLogStore

from ...redis_server import RedisServer
from .records import add_delta, header, seen

# Redis answers late on a busy machine; tests of its absence say how long to wait for it.
PATIENT = RedisLogSettings(ack_timeout_s=20.0, request_timeout_s=20.0, lease_s=1.0)


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
        response_id = log.header.response_id
        log.on_cancel = lambda: self.cancelled.append(response_id)
        log.on_lost = lambda: self.lost.append(response_id)

    def carry_on(self, log: ResponseLog) -> None:
        self.run(log)
        self.carried_on[log.header.response_id] = log

    async def die(self) -> None:
        """It stops as a process that was killed: nothing is tidied up."""
        tasks, self.store._tasks = self.store._tasks, []
        for task in tasks:
            task.cancel()


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
        link = RedisLink(RedisAddress.parse(url), timeout_s=10.0)
        gateway = Gateway(RedisLogStore(link.client, settings), link)
        self._made.append(gateway)
        await gateway.store.start(gateway.carry_on)
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


def with_ack_timeout(seconds: float) -> RedisLogSettings:
    return dataclasses.replace(PATIENT, ack_timeout_s=seconds)
