"""Many responses that begin at once, on a gateway that is busy with them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator

import pytest

from penstock.gateway.errors import RequestRefusedError
from penstock.gateway.storage.conversations.store import StoreUnavailableError
from penstock.gateway.storage.response_log.redis_stream import log_key

from ....redis_server import RedisServer
from .conftest import PATIENT, Gateways
from .records import PATIENCE_S, TENANT, add_end, header, read_to_end, until

pytestmark = pytest.mark.redis
NUM = 300
TURN_S = 0.03
USUAL = dataclasses.replace(PATIENT, request_timeout_s=1.0)


@contextlib.asynccontextmanager
async def slow_loop(turn_s: float = TURN_S) -> AsyncIterator[None]:
    """Every turn of the event loop takes that long."""

    async def hog() -> None:
        while True:
            time.sleep(turn_s)  # noqa: ASYNC251  (that is the point)
            await asyncio.sleep(0)

    task = asyncio.create_task(hog())
    try:
        yield
    finally:
        task.cancel()


async def test_a_busy_loop_is_not_taken_for_a_silent_redis(
    redis_server: RedisServer, gateways: Gateways
) -> None:
    here, there = (
        await gateways.make(redis_server.url, USUAL),
        await gateways.make(redis_server.url),
    )
    async with slow_loop():
        logs = await asyncio.gather(*(here.store.create(header()) for _ in range(NUM)))
    with redis_server.client() as client:
        assert client.scard(f"penstock:owned:{here.store.gateway_id}") == NUM
        assert all(client.ttl(log_key(log.header.response_id)) > 0 for log in logs)
        assert client.info("clients")["connected_clients"] < 30
    add_end(logs[-1])
    found = await there.store.find(TENANT, logs[-1].header.response_id)
    assert await read_to_end(found) == logs[-1].entries


async def test_a_silent_redis_refuses_them_all_in_its_time(
    redis_server: RedisServer, gateways: Gateways
) -> None:
    here = await gateways.make(redis_server.url)
    await here.store.create(header())
    async with asyncio.timeout(PATIENCE_S):
        with redis_server.paused(), here.impatient():
            answers = await asyncio.gather(
                *(here.store.create(header()) for _ in range(20)), return_exceptions=True
            )
    assert {type(answer) for answer in answers} == {StoreUnavailableError}
    await until(lambda: not here.store._writer._torn)  # what it took after all is ended
    await until(lambda: not here.store._writer._chores)
    with redis_server.client() as client:
        assert client.scard(f"penstock:owned:{here.store.gateway_id}") == 1


async def test_who_leaves_before_it_is_open_leaves_nothing_running(
    redis_server: RedisServer, gateways: Gateways
) -> None:
    here = await gateways.make(redis_server.url)
    owned = f"penstock:owned:{here.store.gateway_id}"
    for num_turns in range(12):  # at every moment of its way
        task = asyncio.create_task(here.store.create(header()))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if not task.cancelled():  # it was quicker
            add_end(task.result())
    with redis_server.client() as client:
        await until(lambda: client.scard(owned) == 0 and not here.store._opener._sender)


async def test_a_crowd_of_readers_shares_what_was_read(
    redis_server: RedisServer, gateways: Gateways
) -> None:
    """Of a long response each copy is megabytes, and takes the event loop's time to decode."""
    here = await gateways.make(redis_server.url)
    there = await gateways.make(redis_server.url)
    log = await here.store.create(header())
    for number in range(2000):
        log.append_delta("x" * 100, (number,))
    add_end(log)
    await read_to_end(log)
    response_id = log.header.response_id
    with redis_server.client() as client:
        client.config_resetstat()
        found = await asyncio.gather(*(there.store.find(TENANT, response_id) for _ in range(40)))
        num_pages = client.info("commandstats")["cmdstat_xrange"]["calls"]
    assert len({id(each) for each in found}) == 1
    assert found[0].entries == log.entries
    assert num_pages <= 5
    assert await there.store.find(TENANT, response_id) is found[0]
    await there.store.delete(TENANT, response_id)
    with pytest.raises(RequestRefusedError):
        await there.store.find(TENANT, response_id)
