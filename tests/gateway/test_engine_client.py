"""The wire's near end: merging, ordering, and every way an engine can be lost."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zmq.asyncio

from penstock.engine.errors import EngineDeadError
from penstock.engine.messages import EngineStats, Step
from penstock.engine.request import FinishReason, Request, RequestOutput, SamplingParams
from penstock.gateway import engine_client
from penstock.gateway.engine_client import EngineClient, EngineStream

from .conftest import until
from .fake_engine import FakeEngine


@contextlib.asynccontextmanager
async def linked(path: Path, step_s: float = 0.0) -> AsyncIterator[tuple[EngineClient, FakeEngine]]:
    address = f"ipc://{path}/engine.sock"
    context = zmq.asyncio.Context()
    client = EngineClient(address, context)
    client.start()  # before there is an engine
    try:
        async with FakeEngine(address, [1, 2, 3], step_s=step_s) as engine:
            async with asyncio.timeout(5):
                await client.wait_ready()
            yield client, engine
    finally:
        await client.close()
        context.destroy(linger=0)


def request(request_id: str, max_tokens: int = 10_000) -> Request:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Request(request_id=request_id, prompt_token_ids=(1,), sampling_params=params)


async def drain(stream: EngineStream) -> list[int]:
    token_ids: list[int] = []
    while True:
        output = await stream.next()
        token_ids += output.token_ids
        if output.finish_reason is not None:
            return token_ids


async def test_streams_side_by_side(tmp_path: Path) -> None:
    async with linked(tmp_path) as (client, _):
        streams = [client.submit(request(f"r{n}", max_tokens=n)) for n in range(1, 9)]
        for num, stream in enumerate(streams, start=1):
            assert await drain(stream) == ([1, 2, 3] * num)[:num]


async def test_a_slow_reader_gets_one_merged_output() -> None:
    stream = EngineStream("r")
    for token_id in range(500):
        stream.push(RequestOutput(request_id="r", token_ids=(token_id,), num_cached_tokens=3))
    stream.push(RequestOutput(request_id="r", finish_reason=FinishReason.LENGTH))
    stream.push(RequestOutput(request_id="r", token_ids=(7,)))  # after the end: not ours
    output = await stream.next()
    assert output.token_ids == tuple(range(500))
    assert output.finish_reason is FinishReason.LENGTH


async def test_abort_reaches_the_engine_once(tmp_path: Path) -> None:
    async with linked(tmp_path, step_s=0.01) as (client, engine):
        stream = client.submit(request("r"))
        await stream.next()
        client.abort("r")
        client.abort("r")
        await until(lambda: engine.aborted == {"r"})


async def test_what_came_before_the_death_is_delivered(tmp_path: Path) -> None:
    async with linked(tmp_path, step_s=0.001) as (client, engine):
        stream = client.submit(request("r"))
        await asyncio.sleep(0.05)
        await engine.die()
        await until(lambda: not client.is_alive)
        assert (await stream.next()).token_ids
        with pytest.raises(EngineDeadError, match="out of memory"):
            await stream.next()
        with pytest.raises(EngineDeadError):
            client.submit(request("s"))
        assert client.is_lost


async def test_a_lost_frame_is_a_death(tmp_path: Path) -> None:
    async with linked(tmp_path) as (client, engine):
        stream = client.submit(request("r"))
        await stream.next()
        [identity] = engine.num_steps
        await engine.send(identity, Step(number=10**6, outputs=(), stats=EngineStats()))
        with pytest.raises(EngineDeadError, match="frame 1000000 came where"):
            await drain(stream)
        async with asyncio.timeout(5):  # and a new life begins
            await client.wait_ready()


async def test_silence_is_a_death(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "HEARTBEAT_INTERVAL_S", 0.02)
    async with linked(tmp_path) as (client, engine):
        stream = client.submit(request("r", max_tokens=1))
        await drain(stream)
        stream = client.submit(request("quiet"))
        engine.fall_silent()
        with pytest.raises(EngineDeadError, match="silent"):
            await drain(stream)


async def test_mark_dead(tmp_path: Path) -> None:
    async with linked(tmp_path, step_s=0.01) as (client, _):
        stream = client.submit(request("r"))
        client.mark_dead("the supervisor says so")
        with pytest.raises(EngineDeadError, match="the supervisor says so"):
            await drain(stream)
