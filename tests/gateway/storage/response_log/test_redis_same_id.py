"""Gateways on one Redis that begin a response of the same id."""

from __future__ import annotations

import dataclasses

import pytest

from penstock.gateway.storage.response_log.log import ResponseLog
from penstock.gateway.storage.response_log.log_store import LogExistsError
from penstock.gateway.storage.response_log.redis_stream import log_key
from penstock.gateway.storage.response_log.redis_writer import OwnedLog

from ....redis_server import RedisServer
from .conftest import Gateway, Gateways
from .records import TENANT, add_delta, add_end, header, read_to_end, seen, until

pytestmark = pytest.mark.redis


def twin_of(log: ResponseLog) -> ResponseLog:
    """What another gateway would have begun."""
    return ResponseLog(dataclasses.replace(log.header, nonce="2"))


async def is_whole_elsewhere(log: ResponseLog, gateway: Gateway) -> bool:
    """Whether it is stored, and read there, as it was written."""
    add_end(log)
    await seen(log, len(log.entries))
    found = await gateway.store.find(TENANT, log.header.response_id)
    return await read_to_end(found) == log.entries


async def test_the_first_one_runs_it(redis_server: RedisServer, gateways: Gateways) -> None:
    first, second = [await gateways.make(redis_server.url) for _ in range(2)]
    log = await first.store.create(header())
    first.run(log)
    add_delta(log)
    with pytest.raises(LogExistsError):
        await second.store.create(twin_of(log).header)
    with redis_server.client() as client:  # or others would carry it on after its death
        assert client.smembers(f"penstock:owned:{second.store.gateway_id}") == set()
        assert len(client.smembers(f"penstock:owned:{first.store.gateway_id}")) == 1
    assert await is_whole_elsewhere(log, second)


async def test_who_could_not_begin_does_not_break_what_another_began(
    redis_server: RedisServer, gateways: Gateways
) -> None:
    first, second = [await gateways.make(redis_server.url) for _ in range(2)]
    log = await first.store.create(header())
    first.run(log)
    add_delta(log)
    key = log_key(log.header.response_id)
    assert key is not None
    writer = second.store._writer
    writer.give_up(OwnedLog(log=twin_of(log), key=key, epoch=1, is_begun=False))
    await until(lambda: not writer._torn)
    add_delta(log)
    assert await is_whole_elsewhere(log, second)
