"""An engine that says what cannot be is left alone, and its streams move to another one."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from penstock.engine.protocol.messages import (
    CachedKeys,
    EngineStats,
    Heartbeat,
    Message,
    Step,
)
from penstock.engine.request import Request, RequestOutput, SamplingParams, TokenLogprobs
from penstock.gateway.engines import engine_link
from penstock.gateway.engines.engine_pool import EnginePool
from penstock.gateway.engines.engine_stream import EngineStream
from penstock.gateway.sources import next_of

from ..conftest import PATIENCE_S, until
from ..fake_engine import FakeEngine

SCRIPT = [5, 6, 7]


@contextlib.asynccontextmanager
async def pool(folder: Path) -> AsyncIterator[tuple[EnginePool, FakeEngine, FakeEngine]]:
    """One that says nothing by itself, which has the stream, and one that speaks."""
    one, other = f"{folder}/one.sock", f"{folder}/other.sock"
    client = EnginePool(one, other, routing="least-loaded")
    async with FakeEngine(one, SCRIPT) as silent, FakeEngine(other, SCRIPT) as speaking:
        silent.may_speak.clear()
        client.start()
        try:
            async with asyncio.timeout(PATIENCE_S):
                await until(lambda: client.num_engines == 2)
                yield client, silent, speaking
        finally:
            await client.close()


def opened(client: EnginePool) -> EngineStream:
    """A stream that the silent engine has."""
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    for number in range(4):
        request = Request(request_id=f"r{number}", prompt_token_ids=(1,), sampling_params=params)
        stream = client.submit(request)
        if client.links[0].load.num_streams:
            return stream
    raise AssertionError("it was never chosen")


async def tokens_of(stream: EngineStream) -> list[int]:
    token_ids: list[int] = []
    while not stream.is_over:
        for output in await next_of(stream):
            token_ids += output.token_ids
    return token_ids


def _output(**fields: object) -> Step:
    return Step(number=1, outputs=(RequestOutput(request_id="r", **fields),))  # type: ignore[arg-type]


_LOGPROBS = TokenLogprobs(token_id=5, logprob=-1.0, rank=1, top=((400, -1.0),))


@pytest.mark.parametrize(
    "said",
    [
        _output(token_ids=(400,)),
        _output(token_ids=(-5,)),
        _output(token_ids=(1 << 62,)),
        _output(token_ids=(5,) * 11),
        _output(index=1, token_ids=(5,)),
        _output(index=-1, token_ids=(5,)),
        _output(num_cached_tokens=1 << 62),
        Step(number=1, outputs=(), tokens={"r": 400}),
        Step(number=1, outputs=(), tokens={"r": -5}),
        _output(prompt_logprobs=(TokenLogprobs(token_id=1, logprob=-1.0, rank=1),)),
        _output(token_ids=(5,), logprobs=(TokenLogprobs(token_id=5, logprob=-1.0, rank=1),) * 2),
        _output(token_ids=(5,), logprobs=(_LOGPROBS,)),
        Heartbeat(stats=EngineStats(num_requests_waiting=1 << 62)),
        Heartbeat(stats=EngineStats(num_tokens_waiting=1 << 40)),
        Heartbeat(stats=EngineStats(prefill_tokens_per_s=math.nan)),
        Heartbeat(since_step_s=-math.inf),
        CachedKeys(number=1, added=b"abc", is_snapshot=True),
    ],
    ids=lambda said: repr(said)[:60],
)
async def test_it_is_left_alone_and_its_streams_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Message
) -> None:
    monkeypatch.setattr(engine_link, "_SHUN_S", 1e9)
    async with pool(tmp_path) as (client, silent, _):
        stream = opened(client)
        if isinstance(said, Step) and said.outputs:
            [output] = said.outputs
            output = msgspec.structs.replace(output, request_id=stream.wire_id or "")
            said = msgspec.structs.replace(said, outputs=(output,))
        for gateway in list(silent.num_steps):
            await silent.send(gateway, said)
        assert await tokens_of(stream) == [5, 6, 7, 5, 6, 7, 5, 6, 7, 5]
        assert stream.num_strikes == 0
        assert client.links[0].info is None
        assert client.stats.num_requests_waiting < 1 << 40


async def test_one_engines_queue_turns_nobody_away_while_another_has_none(tmp_path: Path) -> None:
    """A figure that could be, and need not be true."""
    many = EngineStats(num_requests_waiting=100_000, num_tokens_waiting=100_000_000)
    async with pool(tmp_path) as (client, silent, speaking):
        silent.stats, speaking.stats = many, EngineStats()
        await until(lambda: client.links[0].stats == many)
        await until(lambda: client.links[1].stats == speaking.stats)
        assert (client.stats.num_requests_waiting, client.stats.num_tokens_waiting) == (0, 0)
        speaking.stats = EngineStats(num_requests_waiting=3, num_tokens_waiting=50)
        await until(lambda: client.links[1].stats == speaking.stats)
        assert (client.stats.num_requests_waiting, client.stats.num_tokens_waiting) == (6, 100)
