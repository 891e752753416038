"""How often a gateway goes to Redis, and how it does so in a cluster."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from penstock.gateway.storage.response_log import redis_writer
from penstock.gateway.storage.response_log.log import ResponseLog
from penstock.gateway.storage.response_log.redis_stream import Command, lean_round_trip, log_key

from ....redis_server import RedisServer
from .conftest import PATIENT, Gateways, Owner
from .records import TENANT, add_delta, add_end, header, read_to_end, seen, until

pytestmark = pytest.mark.redis


async def test_all_logs_of_an_iteration_leave_in_one_pipeline(
    redis_server: RedisServer, gateways: Gateways, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = await gateways.make(redis_server.url)
    logs = [await here.store.create(header()) for _ in range(300)]
    pipelines: list[int] = []

    async def counted(redis: Redis, commands: Sequence[Command]) -> list[Any]:
        pipelines.append(len(commands))
        return await lean_round_trip(redis, commands)

    monkeypatch.setattr(redis_writer, "lean_round_trip", counted)
    for iteration in range(1, 4):

        async def run(log: ResponseLog) -> None:  # each response is a task of its own
            add_delta(log)
            add_delta(log)

        await asyncio.gather(*(run(log) for log in logs))
        for log in logs:
            await seen(log, 2 * iteration)
    assert pipelines == [600, 600, 600]
    assert all(log.is_resumable for log in logs)


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


async def test_a_cluster_serves_as_one_server_does(tmp_path: Path, gateways: Gateways) -> None:
    with RedisServer(tmp_path / "cluster", is_cluster=True) as server:
        url = server.url.replace("redis://", "redis+cluster://").removesuffix("/0")
        here, there = await gateways.make(url), await gateways.make(url)
        logs = [await here.store.create(header()) for _ in range(20)]
        replicas = [await there.store.find(TENANT, log.header.response_id) for log in logs]
        reading = [asyncio.create_task(read_to_end(replica)) for replica in replicas]
        logs[0].owner = owner = Owner()
        await there.store.cancel(TENANT, logs[0].header.response_id)
        await until(lambda: owner.cancelled)
        for log in logs[1:]:
            add_delta(log)
            add_end(log)
        for log, task in zip(logs[1:], reading[1:], strict=True):
            assert await task == await read_to_end(log)
        add_delta(logs[0])
        await seen(logs[0], 1)
        await here.die()
        await until(lambda: there.carried_on)
        (taken,) = there.carried_on.values()
        add_end(taken)
        assert await reading[0] == await read_to_end(taken)
        await gateways.close()


def test_keys_of_a_response_share_the_slot_of_its_conversation() -> None:
    made = header()
    tree = made.conversation_id.removeprefix("conv_")
    assert f"{{{tree}}}" in str(log_key(made.response_id))
    assert log_key("resp_of_somebody_else") is None
