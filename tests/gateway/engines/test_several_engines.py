"""Several engines behind one client: streams that leave one for another, and who is let in."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.engine.protocol.messages import (
    BlocksStored,
    CachedKeys,
    Draining,
    EngineStats,
    FetchBlocks,
    KVBlock,
    KVBlocks,
    WantKeys,
)
from penstock.engine.request import Request, SamplingParams
from penstock.gateway.engines import engine_link, kv_transfer
from penstock.gateway.engines.engine_pool import EnginePool, total_stats
from penstock.gateway.engines.engine_stream import EngineStream
from penstock.gateway.engines.routing import BlockKeys
from penstock.gateway.sources import next_of

from ..conftest import PATIENCE_S, until
from ..fake_engine import INFO, FakeEngine

_SCRIPT = [1, 2, 3]


class Engine(FakeEngine):
    """One that notes who asks for its keys, and has all blocks that it is asked for.

    Attributes:
        fetched, stored: keys of blocks that were taken from it, and given to it.
        fault: what it does instead of answering.
        num_free: blocks that it has room for.
        num_let_go: how often it was told that nothing more is fetched.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.num_asked = self.num_let_go = 0
        self.fetched: list[bytes] = []
        self.stored: list[bytes] = []
        self.fault = ""
        self.num_free = 1000

    async def _take(self, gateway: int, message: Any) -> None:
        if isinstance(message, WantKeys):
            self.num_asked += 1
        elif isinstance(message, FetchBlocks):
            await self._give(gateway, message)
        elif isinstance(message, KVBlocks):
            self.stored += [block.key for block in message.blocks][: self.num_free]
            answer = BlocksStored(
                number=message.number, num_blocks=min(self.num_free, len(message.blocks))
            )
            await self.send(gateway, answer)
        else:
            await super()._take(gateway, message)

    async def _give(self, gateway: int, message: FetchBlocks) -> None:
        self.num_let_go += not message.keys
        if self.fault == "dies":
            self.kill()
        elif self.fault != "says nothing" and message.keys:
            self.fetched += message.keys
            blocks = tuple(
                KVBlock(parent=b"", tokens=b"", key=key, data=b"", checksum=0)
                for key in (() if self.fault == "has none" else message.keys)
            )
            await self.send(
                gateway,
                KVBlocks(number=message.number, kv_root=self.info.kv_root, blocks=blocks),
            )

    async def tell_all(self, message: Draining | CachedKeys) -> None:
        for gateway in list(self.num_steps):
            await self.send(gateway, message)


@contextlib.asynccontextmanager
async def pool(
    path: Path,
    num: int = 2,
    roots: tuple[bytes, ...] = (),
    kv_root: bytes = b"",
    **options: object,
) -> AsyncIterator[tuple[EnginePool, list[Engine]]]:
    addresses = [f"{path}/{index}.sock" for index in range(num)]
    client = EnginePool(*addresses, **options)  # type: ignore[arg-type]
    async with contextlib.AsyncExitStack() as stack:
        engines = []
        for index, address in enumerate(addresses):
            root = roots[index] if roots else b""
            info = msgspec.structs.replace(
                INFO, pid=100 * index, cache_root=root, kv_root=kv_root, num_block_bytes=256 << 10
            )
            engine = Engine(address, _SCRIPT, step_s=0.002, info=info)
            engines.append(await stack.enter_async_context(engine))
        client.start()
        stack.push_async_callback(client.close)
        await until(lambda: all(link.info for link in client.links))
        yield client, engines


@pytest.fixture(autouse=True)
def _patiently(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_link, "HEARTBEAT_INTERVAL_S", 0.02)
    monkeypatch.setattr(engine_link, "MAX_SILENT_BEATS", 1000)


def _request(name: str, max_tokens: int = 60, prompt: tuple[int, ...] = (1,)) -> Request:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Request(request_id=name, prompt_token_ids=prompt, sampling_params=params)


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


_PROMPT = tuple(range(160))  # 10 blocks, each a chunk


async def _drain_one(
    client: EnginePool, engines: list[Engine], *, prefill_tokens_per_s: float = 0.0
) -> tuple[Engine, Engine, list[bytes]]:
    """The engine that drained, the other, and the keys of the stream that moved."""
    stats = EngineStats(num_host_blocks=64, prefill_tokens_per_s=prefill_tokens_per_s)
    for engine in engines:
        engine.stats = stats
    await until(lambda: all(link.stats.num_host_blocks == 64 for link in client.links))
    stream = client.submit(_request("r", prompt=_PROMPT))
    await until(lambda: bool(stream.token_ids[0]))
    old, new = engines if engines[0].submitted else reversed(engines)
    await old.tell_all(Draining())
    assert await _read(stream) == _SCRIPT * 20
    assert len(new.submitted) == 1
    assert stream.num_deaths == 0
    assert client.links[0].load.tokens(EngineStats()) == 0
    assert client.links[1].load.tokens(EngineStats()) == 0
    return old, new, BlockKeys(new.info, EngineStream(_request("r", prompt=(*_PROMPT, 1)))).full()


async def test_the_kv_of_a_stream_goes_along(tmp_path: Path) -> None:
    async with pool(tmp_path, kv_root=b"k", kv_transfer="always") as (client, engines):
        old, new, keys = await _drain_one(client, engines)
        assert len(keys) == 10
        assert old.fetched[:10] == new.stored[:10] == keys
        await until(lambda: old.num_let_go == 1)  # and it may end


@pytest.mark.parametrize(("rate", "num_blocks"), [(0.0, 0), (1e9, 1), (10.0, 10)])
async def test_kv_goes_along_where_that_is_quicker(
    tmp_path: Path, rate: float, num_blocks: int
) -> None:
    """Nothing without a measured rate; after the first block the link is measured too."""
    async with pool(tmp_path, kv_root=b"k") as (client, engines):
        _, new, _ = await _drain_one(client, engines, prefill_tokens_per_s=rate)
        assert len(new.stored[:10]) == num_blocks


@pytest.mark.parametrize("mode", ["never", "always"])
async def test_kv_stays_where_it_is_told_to_or_cannot_go(tmp_path: Path, mode: str) -> None:
    kv_root = b"k" if mode == "never" else b""
    async with pool(tmp_path, kv_root=kv_root, kv_transfer=mode) as (client, engines):
        old, _, _ = await _drain_one(client, engines)
        assert not old.fetched


@pytest.mark.parametrize("fault", ["dies", "has none", "says nothing", "the other is full"])
async def test_a_stream_is_not_lost_with_its_kv(
    tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault == "says nothing":
        monkeypatch.setattr(kv_transfer, "_ANSWER_S", 0.02)
    async with pool(tmp_path, kv_root=b"k", kv_transfer="always") as (client, engines):
        for engine in engines:
            engine.fault = fault
            engine.num_free = 0 if fault == "the other is full" else 1000
        _, new, _ = await _drain_one(client, engines)
        assert not new.stored


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
