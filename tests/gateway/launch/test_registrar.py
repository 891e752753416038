"""What registers an engine: as long as it answers and takes requests."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from penstock.engine.protocol.messages import Draining
from penstock.gateway.launch.registrar import Registrar
from penstock.gateway.storage.redis.engines import RedisEngines
from penstock.gateway.storage.redis.link import RedisLink
from penstock.gateway.storage.redis.url import RedisAddress
from tests.redis_server import RedisServer

from ..conftest import PATIENCE_S
from ..fake_engine import FakeEngine

pytestmark = pytest.mark.redis


@pytest.mark.usefixtures("soon_alarmed")
async def test_an_engine_is_registered_while_it_takes_requests(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    engines = RedisEngines(RedisLink(RedisAddress.parse(redis_server.url)), "m")
    address = f"{tmp_path}/engine.sock"
    registrar = Registrar(engines, model="m", engine_address=address, advertised="10.0.0.1:7000")
    stopped = asyncio.Event()

    async def until_registered(names: set[str]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while {each.address for each in await engines.records()} != names:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async with FakeEngine(address, [1, 2, 3]) as engine:
        running = asyncio.create_task(registrar.run(stopped))
        await until_registered({"10.0.0.1:7000"})
        (record,) = await engines.records()
        assert (record.model, record.block_size) == ("m", engine.info.block_size)
        engine.kill()
        await until_registered(set())
        engine.restart()
        await until_registered({"10.0.0.1:7000"})
        for gateway in list(engine.num_steps):
            await engine.send(gateway, Draining())
        await until_registered(set())
        engine.kill()
        engine.restart()
        await until_registered({"10.0.0.1:7000"})
        stopped.set()
        registrar.wake()
        await running
        assert await engines.records() == []
    await engines.close()
