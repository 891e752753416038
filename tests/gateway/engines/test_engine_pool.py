"""The wire's near end: merging, ordering, and every way an engine can be lost."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import msgspec
import pytest
import uvloop

from penstock.engine.errors import EngineDeadError
from penstock.engine.protocol.checks import PeerFaultError
from penstock.engine.protocol.messages import DropPrefix, EngineStats, Step
from penstock.engine.request import (
    FinishReason,
    Notice,
    Request,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
)
from penstock.gateway.engines import engine_link
from penstock.gateway.engines.engine_pool import EnginePool
from penstock.gateway.engines.engine_stream import EngineStream
from penstock.gateway.sources import next_of

from ..conftest import PATIENCE_S, until
from ..fake_engine import FakeEngine


@contextlib.asynccontextmanager
async def linked(
    path: Path, step_s: float = 0.0, **options: float
) -> AsyncIterator[tuple[EnginePool, FakeEngine]]:
    address = f"{path}/engine.sock"
    client = EnginePool(address, **options)  # type: ignore[arg-type]
    client.start()  # before there is an engine
    try:
        async with FakeEngine(address, [1, 2, 3], step_s=step_s) as engine:
            async with asyncio.timeout(PATIENCE_S):
                await client.wait_ready()
            yield client, engine
    finally:
        await client.close()


def request(request_id: str, max_tokens: int = 10_000, n: int = 1) -> Request:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, n=n)
    return Request(request_id=request_id, prompt_token_ids=(1,), sampling_params=params)


def patiently(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deaths are noticed soon, and silence is none."""
    monkeypatch.setattr(engine_link, "HEARTBEAT_INTERVAL_S", 0.02)
    monkeypatch.setattr(engine_link, "MAX_SILENT_BEATS", 1000)


async def drain(stream: EngineStream) -> list[int]:
    token_ids: list[int] = []
    while True:
        for output in await next_of(stream):
            token_ids += output.token_ids
            if output.is_last:
                return token_ids


async def test_streams_side_by_side(tmp_path: Path) -> None:
    async with linked(tmp_path) as (client, _):
        streams = [client.submit(request(f"r{n}", max_tokens=n)) for n in range(1, 9)]
        for num, stream in enumerate(streams, start=1):
            assert await drain(stream) == ([1, 2, 3] * num)[:num]


async def test_the_time_since_the_last_step_needs_no_heartbeat(tmp_path: Path) -> None:
    """A step may get stuck before the engine has said that it has work."""
    async with linked(tmp_path) as (client, _):
        assert client.since_step_s == 0
        stream = client.submit(request("r"))
        assert client.since_step_s > 0
        await next_of(stream)
        first = client.since_step_s
        assert 0 < first < client.since_step_s
        client.abort(stream)


async def test_a_slow_reader_gets_one_merged_output() -> None:
    stream = EngineStream(request("r"))
    for token_id in range(500):
        stream.push(RequestOutput(request_id="r", token_ids=(token_id,), num_cached_tokens=3))
    stream.push(RequestOutput(request_id="r", finish_reason=FinishReason.LENGTH, is_last=True))
    stream.push(RequestOutput(request_id="r", token_ids=(7,)))  # after the end: not ours
    [output] = await next_of(stream)
    assert output.token_ids == tuple(range(500))
    assert output.finish_reason is FinishReason.LENGTH
    assert output.num_cached_tokens == 3


async def test_branches_merge_apart_and_notices_keep_their_place() -> None:
    stream = EngineStream(request("r", n=2))

    def push(index: int, *token_ids: int, notice: Notice | None = None) -> None:
        stream.push(RequestOutput(request_id="r", index=index, token_ids=token_ids, notice=notice))

    for token_id in range(3):
        push(0, token_id)
        push(1, token_id + 10)
    push(0, notice=Notice.PREEMPTED)
    push(1, 13)
    push(0, 3, notice=Notice.RESUMED)
    push(0, 4)
    merged = [(item.index, item.token_ids, item.notice) for item in await next_of(stream)]
    assert merged == [
        (0, (0, 1, 2), None),
        (1, (10, 11, 12, 13), None),
        (0, (), Notice.PREEMPTED),
        (0, (3, 4), Notice.RESUMED),
    ]
    push(0, 5)
    [output] = await next_of(stream)
    assert output.token_ids == (5,)


@pytest.mark.parametrize("seed", range(20))
async def test_tokens_come_as_outputs_of_one_token_would(seed: int) -> None:
    """Whatever comes between them, and whenever they are taken."""
    random = Random(seed)
    plain, other = (EngineStream(request("r", n=2)) for _ in range(2))
    for token_id in range(40):
        output = RequestOutput(request_id="r", token_ids=(token_id,))
        output.index = int(random.random() < 0.2)
        output.notice = Notice.PREEMPTED if random.random() < 0.1 else None
        output.num_cached_tokens = int(random.random() < 0.1)
        plain.push(output)
        is_token = output == RequestOutput(request_id="r", token_ids=(token_id,))
        if not (is_token and other.push_token(token_id)):
            other.push(output)
        if random.random() < 0.3:
            taken, token_ids = plain.take(), other.take_tokens()
            if token_ids is None:
                assert other.take() == taken
            else:
                [same] = taken
                assert same == RequestOutput(request_id="r", token_ids=tuple(token_ids))
    assert other.token_ids == plain.token_ids
    for stream in (plain, other):
        stream.push(RequestOutput(request_id="r", token_ids=(40,)))
    assert other.push_token(41)
    plain.push(RequestOutput(request_id="r", token_ids=(41,)))
    for stream in (plain, other):
        stream.fail(EngineDeadError("it died"))
        assert not stream.is_over
    assert not other.push_token(1)
    assert other.take() == plain.take()


async def test_more_tokens_than_were_asked_for_are_the_engines_fault() -> None:
    stream = EngineStream(request("r", max_tokens=3))
    assert not stream.push_token(1)  # the first may say more
    stream.push(RequestOutput(request_id="r", token_ids=(1,)))
    assert stream.push_token(2)
    assert stream.push_token(3)
    with pytest.raises(PeerFaultError, match="more than max_tokens"):
        stream.push_token(4)


async def test_prompt_logprobs_merge_in_order() -> None:
    prompted = msgspec.structs.replace(request("r"), prompt_token_ids=(9, 0, 1, 2, 3))
    stream = EngineStream(prompted)
    entries = [TokenLogprobs(token_id=n, logprob=-1.0, rank=1) for n in range(4)]
    for entry in entries:
        stream.push(RequestOutput(request_id="r", prompt_logprobs=(entry,)))
    [output] = await next_of(stream)
    assert output.prompt_logprobs == tuple(entries)


async def test_a_link_that_is_often_lost_is_no_death_of_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where this gateway stands still again and again: the engine buries it and lives."""
    patiently(monkeypatch)
    async with linked(tmp_path) as (client, engine):
        engine.may_speak.clear()
        stream = client.submit(request("r", max_tokens=10))
        for name in ("r", *(f"r~{number}" for number in range(1, 8))):
            await until(lambda name=name: name in engine.submitted)
            engine.lose_gateways()
        await until(lambda: "r~8" in engine.submitted)
        engine.may_speak.set()
        async with asyncio.timeout(PATIENCE_S):
            assert await drain(stream) == [1, 2, 3, 1, 2, 3, 1, 2, 3, 1]
        assert stream.num_deaths == 0


async def test_the_next_engine_is_looked_for_without_waiting_for_a_beat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_link, "HEARTBEAT_INTERVAL_S", 1e6)
    async with linked(tmp_path) as (client, engine):
        engine.may_speak.clear()
        stream = client.submit(request("r", max_tokens=4))
        await until(lambda: "r" in engine.submitted)
        engine.lose_gateways()
        await until(lambda: "r~1" in engine.submitted)
        engine.may_speak.set()
        async with asyncio.timeout(PATIENCE_S):
            assert await drain(stream) == [1, 2, 3, 1]


async def test_abort_reaches_the_engine_once(tmp_path: Path) -> None:
    async with linked(tmp_path, step_s=0.01) as (client, engine):
        stream = client.submit(request("r"))
        await next_of(stream)
        client.abort(stream)
        client.abort(stream)
        await until(lambda: engine.aborted == {"r"})


async def test_a_branch_is_aborted_alone(tmp_path: Path) -> None:
    async with linked(tmp_path, step_s=0.01) as (client, engine):
        stream = client.submit(request("r", n=2))
        await next_of(stream)
        client.abort_branch(stream, 1)
        await until(lambda: engine.aborted_branches == {("r", 1)})
        while any(output.index == 1 for output in await next_of(stream)):
            pass  # it was on its way
        outputs = [output for _ in range(5) for output in await next_of(stream)]
        assert {output.index for output in outputs} == {0}  # the other goes on, alone
        client.abort(stream)
        client.abort_branch(stream, 0)  # the request is over
        await until(lambda: engine.aborted == {"r"})
        assert engine.aborted_branches == {("r", 1)}


async def test_an_engine_forgets_a_prefix(tmp_path: Path) -> None:
    async with linked(tmp_path) as (client, engine):
        client.drop_prefix([1, 2, 3], "salt")
        await until(lambda: len(engine.dropped) == 1)
        assert engine.dropped == [DropPrefix(token_ids=(1, 2, 3), cache_salt="salt")]
        await engine.die()
        await until(lambda: client.is_lost)
        client.drop_prefix([1], "")  # nothing is left to forget, and nobody is told


async def test_gauges_die_with_the_engine_and_counters_stay(tmp_path: Path) -> None:
    async with linked(tmp_path) as (client, engine):
        engine.stats = EngineStats(
            num_requests_running=1, num_requests_swapped=2, num_blocks_cached=3, num_blocks=64,
            num_preemptions_total=4, num_accepted_tokens_per_pos_total=(3, 1),
        )  # fmt: skip
        await until(lambda: client.stats.num_preemptions_total == 4)
        await engine.die()
        await until(lambda: client.is_lost)
        assert client.stats == EngineStats(
            num_blocks=64, num_preemptions_total=4, num_accepted_tokens_per_pos_total=(3, 1)
        )


async def test_what_came_before_the_death_is_delivered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patiently(monkeypatch)
    async with linked(tmp_path, step_s=0.001, engine_wait_s=0.1) as (client, engine):
        stream = client.submit(request("r"))
        await until(lambda: len(stream.token_ids[0]) > 0)
        await engine.die()
        await until(lambda: not client.is_alive)
        assert (await next_of(stream))[0].token_ids
        with pytest.raises(EngineDeadError, match="out of memory"):
            await next_of(stream)
        with pytest.raises(EngineDeadError):
            client.submit(request("s"))
        assert client.is_lost


@pytest.mark.usefixtures("soon_alarmed")
async def test_a_lost_frame_is_a_death(tmp_path: Path) -> None:
    async with linked(tmp_path, step_s=0.005) as (client, engine):
        stream = client.submit(request("r", max_tokens=60))
        num_before = sum(len(output.token_ids) for output in await next_of(stream))
        [identity] = engine.num_steps
        await engine.send(identity, Step(number=10**6, outputs=(), stats=EngineStats()))
        # A new life begins, the old one's request is given up, and nothing of its text is lost.
        assert num_before + len(await drain(stream)) == 60
        await until(lambda: engine.aborted == {"r"})
        assert list(engine.submitted) == ["r", "r~1"]


async def test_silence_is_a_death(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    max_silent_beats = engine_link.MAX_SILENT_BEATS
    patiently(monkeypatch)
    async with linked(tmp_path, engine_wait_s=0.1) as (client, engine):
        stream = client.submit(request("r", max_tokens=1))
        await drain(stream)
        monkeypatch.setattr(engine_link, "MAX_SILENT_BEATS", max_silent_beats)
        stream = client.submit(request("quiet"))
        engine.fall_silent()
        with pytest.raises(EngineDeadError, match="silent"):
            await drain(stream)


async def test_disconnect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patiently(monkeypatch)
    async with linked(tmp_path, step_s=0.01, engine_wait_s=0.1) as (client, engine):
        stream = client.submit(request("r"))
        engine.kill()
        client.disconnect("the supervisor says so")
        with pytest.raises(EngineDeadError, match="the supervisor says so"):
            await drain(stream)


def test_a_killed_engine_is_told_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In the event loop of the server, whose sockets raise RuntimeError once they are closed."""

    async def lose() -> None:
        async with linked(tmp_path, step_s=0.01) as (client, engine):
            client.submit(request("a"))
            client.submit(request("b"))
            await until(lambda: len(engine.submitted) == 2)
            engine.kill()
            await until(lambda: client.info is None and bool(caplog.records))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(lose())
    [record] = [each for each in caplog.records if each.name.startswith("penstock")]
    assert record.exc_info is None
    assert record.getMessage() == (
        "lost the engine: its connection closed; looking for the next one, for which 2 open "
        "streams wait at most 60 s"
    )
