"""How often a gateway goes to Redis, with how much, and to which slots of a cluster."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
import redis

from penstock.gateway.storage.response_log.log import ResponseLog

from ....redis_server import RedisServer
from .conftest import PATIENT, Gateways, begin
from .records import TENANT, add_delta, add_end, header, read_to_end, seen, until
from .stored import log_key
from .wire import Wire

pytestmark = pytest.mark.redis


async def test_all_logs_of_an_iteration_leave_in_one_pipeline(
    redis_server: RedisServer, gateways: Gateways
) -> None:
    """However many they are: on one connection, and before any reply has come."""
    here = await gateways.make(redis_server.url, is_wired=True)
    wire = here.wire
    assert wire is not None
    logs = [await here.store.create(header()) for _ in range(300)]
    keys = {log_key(log.header.response_id).encode() for log in logs}

    async def run(log: ResponseLog) -> None:  # each response is a task of its own
        add_delta(log)
        add_delta(log)

    for iteration in range(1, 4):
        wire.sent.clear()
        replies = wire.hold("XADD", log_key(logs[0].header.response_id), is_after=True)
        await asyncio.gather(*(run(log) for log in logs))
        await until(lambda: len(connections(wire, keys)) == 600)
        assert not any(log.replica.num_visible == 2 * iteration for log in logs)
        replies.end()
        for log in logs:
            await seen(log, 2 * iteration)
        assert len(connections(wire, keys)) == 600
        assert len(set(connections(wire, keys))) == 1
    assert all(log.is_resumable for log in logs)


def connections(wire: Wire, keys: set[bytes]) -> list[int]:
    """Of each command that writes to one of the keys."""
    return [number for number, words in wire.sent if words[0] == b"XADD" and words[1] in keys]


async def test_a_log_that_became_too_long_goes_on_without_redis(
    redis_server: RedisServer, gateways: Gateways
) -> None:
    settings = dataclasses.replace(PATIENT, max_log_bytes=1000)
    here = await gateways.make(redis_server.url, settings)
    log = await here.store.create(header())
    for number in range(1, 30):
        add_delta(log, "x" * 100)
        await seen(log, number)
    assert not log.is_resumable
    add_end(log)
    assert len(await read_to_end(log)) == 30


async def test_keys_of_a_response_share_the_slot_of_its_conversation(
    redis_server: RedisServer, client: redis.Redis, gateways: Gateways
) -> None:
    here, there = await gateways.make(redis_server.url), await gateways.make(redis_server.url)
    log = await begin(here, 1)
    replica = await there.store.find(TENANT, log.header.response_id)
    await there.store.cancel(TENANT, log.header.response_id)
    tree = log.header.conversation_id.removeprefix("conv_")
    keys = client.keys(f"*{log.header.response_id}*")
    assert len(keys) == 3  # its stream, and the marks that it is read and was cancelled
    assert all(f"{{{tree}}}".encode() in key for key in keys)
    assert replica.header == log.header
