"""Several engines behind one client: streams that leave one for another, and who is let in."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from penstock.engine.request import Request, SamplingParams
from penstock.engine.transport.messages import CachedKeys, Draining, EngineStats, WantKeys
from penstock.gateway.engines import engine_link
from penstock.gateway.engines.engine_client import EngineClient, total_stats
from penstock.gateway.engines.engine_stream import EngineStream
from penstock.gateway.sources import next_of

from ..conftest import PATIENCE_S, until
from ..fake_engine import INFO, FakeEngine

_SCRIPT = [1, 2, 3]


class Engine(FakeEngine):
    """One that notes who asks for its keys."""

    num_asked = 0

    async def _take(self, gateway: int, message: object) -> None:
        if isinstance(message, WantKeys):
            self.num_asked += 1
        else:
            await super()._take(gateway, message)  # type: ignore[arg-type]

    async def tell_all(self, message: Draining | CachedKeys) -> None:
        for gateway in list(self.num_steps):
            await self.send(gateway, message)


@contextlib.asynccontextmanager
async def pool(
    path: Path, num: int = 2, roots: tuple[bytes, ...] = (), **options: object
) -> AsyncIterator[tuple[EngineClient, list[Engine]]]:
    addresses = [f"{path}/{index}.sock" for index in range(num)]
    client = EngineClient(*addresses, **options)  # type: ignore[arg-type]
    async with contextlib.AsyncExitStack() as stack:
        engines = []
        for index, address in enumerate(addresses):
            root = roots[index] if roots else b""
            info = msgspec.structs.replace(INFO, pid=100 * index, cache_root=root)
            engine = Engine(address, _SCRIPT, step_s=0.005, info=info)
            engines.append(await stack.enter_async_context(engine))
        client.start()
        stack.push_async_callback(client.close)
        await until(lambda: all(link.info for link in client.links))
        yield client, engines


@pytest.fixture(autouse=True)
def _patiently(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_link, "HEARTBEAT_INTERVAL_S", 0.02)
    monkeypatch.setattr(engine_link, "MAX_SILENT_BEATS", 1000)


def _request(name: str, max_tokens: int = 60) -> Request:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Request(request_id=name, prompt_token_ids=(1,), sampling_params=params)


async def _read(stream: EngineStream) -> list[int]:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if any(output.is_last for output in await next_of(stream)):
                return stream.token_ids[0]


async def test_the_streams_of_a_killed_engine_continue_in_another(tmp_path: Path) -> None:
    async with pool(tmp_path, routing="round-robin") as (client, engines):
        streams = [client.submit(_request(f"r{number}")) for number in range(6)]
        await until(lambda: all(len(stream.token_ids[0]) > 2 for stream in streams))
        assert [len(engine.submitted) for engine in engines] == [3, 3]
        engines[0].kill()  # and nobody restarts it
        for stream in streams:
            assert await _read(stream) == _SCRIPT * 20
        assert len(engines[1].submitted) == 6
        assert (client.is_alive, client.is_lost, client.num_engines) == (True, False, 1)
        assert client.links[0].load.num_streams == client.links[1].load.num_streams == 0


async def test_the_streams_of_a_draining_engine_leave_it(tmp_path: Path) -> None:
    async with pool(tmp_path, routing="round-robin") as (client, engines):
        streams = [client.submit(_request(f"r{number}")) for number in range(4)]
        await until(lambda: all(stream.token_ids[0] for stream in streams))
        await engines[1].tell_all(Draining())
        for stream in streams:
            assert await _read(stream) == _SCRIPT * 20
            assert stream.num_deaths == 0
        assert len(engines[1].aborted) == 2  # and it may end
        later = client.submit(_request("later"))
        assert await _read(later) == _SCRIPT * 20
        assert "later" in engines[0].submitted
        engines[1].kill()
        engines[1].restart()
        await until(lambda: client.num_engines == 2)


async def test_the_last_engine_to_drain_keeps_its_streams(tmp_path: Path) -> None:
    async with pool(tmp_path, 1) as (client, engines):
        stream = client.submit(_request("r"))
        await until(lambda: bool(stream.token_ids[0]))
        await engines[0].tell_all(Draining())
        await until(lambda: not client.is_alive)
        assert await _read(stream) == _SCRIPT * 20
        assert not engines[0].aborted


async def test_links_that_are_lost_together_are_no_death(tmp_path: Path) -> None:
    """As when this gateway was stopped for so long that all engines gave it up."""
    async with pool(tmp_path, 3) as (client, engines):
        stream = client.submit(_request("r"))
        for _ in range(6):
            await until(lambda: client.num_engines == 3)
            for engine in engines:
                engine.lose_gateways()
            await until(lambda: not client.is_alive)
        assert await _read(stream) == _SCRIPT * 20
        assert stream.num_strikes == 0


async def test_an_engine_with_another_cache_gets_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with pool(tmp_path, 3, roots=(b"a", b"b", b"a")) as (client, engines):
        for number in range(6):
            await _read(client.submit(_request(f"r{number}", max_tokens=2)))
        first = client.info_for_running().cache_root  # that of whichever answered first
        used = {engine.info.cache_root for engine in engines if engine.submitted}
        assert used == {first}
        assert "gets no requests: its model, weights, types or block size differ" in caplog.text


async def test_a_lost_message_about_keys_is_made_up_for(tmp_path: Path) -> None:
    async with pool(tmp_path) as (client, engines):
        load = client.links[0].load
        await until(lambda: engines[0].num_asked == 1)
        one, two = (1).to_bytes(4, "little"), (2).to_bytes(4, "little")
        await engines[0].tell_all(CachedKeys(number=4, added=two))  # before the snapshot: void
        await engines[0].tell_all(CachedKeys(number=5, added=one, is_snapshot=True))
        await until(lambda: 1 in load.keys)
        assert 2 not in load.keys
        await engines[0].tell_all(CachedKeys(number=6, added=two, removed=one))
        await until(lambda: 2 in load.keys)
        assert 1 not in load.keys
        await engines[0].tell_all(CachedKeys(number=8, added=one))
        await until(lambda: engines[0].num_asked == 2)
        assert 1 not in load.keys
        await engines[0].tell_all(CachedKeys(number=9, added=one, is_snapshot=True))
        await until(lambda: 1 in load.keys)
        assert len(load.keys) == 1


async def test_one_engine_is_not_asked_for_keys(tmp_path: Path) -> None:
    async with pool(tmp_path, 1) as (client, engines):
        await _read(client.submit(_request("r")))
        assert engines[0].num_asked == 0


def test_the_numbers_of_several_engines_are_added_up() -> None:
    first = EngineStats(num_blocks=3, num_steps_total=2, num_accepted_tokens_per_pos_total=(4, 1))
    second = EngineStats(num_blocks=4, num_accepted_tokens_per_pos_total=(1,))
    assert total_stats([first, second]) == EngineStats(
        num_blocks=7, num_steps_total=2, num_accepted_tokens_per_pos_total=(5, 1)
    )
