"""KV blocks that go from one engine to another, which then finds them as a cached prefix."""

from __future__ import annotations

import contextlib
import itertools
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from penstock.engine.engine_core import EngineCore
from penstock.engine.process.server import _LEAVE_S, EngineServer
from penstock.engine.protocol.messages import (
    BlocksStored,
    Draining,
    EngineInfo,
    FetchBlocks,
    KVBlock,
    KVBlocks,
    Step,
)
from penstock.engine.request import Request, SamplingParams
from penstock.engine.startup import build_core

from .process.stack import PATIENCE_S, Gateway, wait_until

_BLOCK_SIZE = 8
_PROMPT = tuple(range(3, 103))  # 12 blocks, and a part
_NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=160, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=128,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def build(model: Path, **cache: Any) -> tuple[EngineCore, EngineInfo]:
    sizes = {"num_blocks": 64, "block_size": _BLOCK_SIZE, "num_host_blocks": 64}
    return build_core(
        EngineConfig(
            model=ModelConfig(model=str(model), dtype="float32", max_model_len=128),
            cache=CacheConfig(**{**sizes, **cache}),
            scheduler=SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=4),
        )
    )


def request(name: str = "r", **fields: Any) -> Request:
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=20, ignore_eos=True)
    return Request(request_id=name, prompt_token_ids=_PROMPT, sampling_params=params, **fields)


def run(core: EngineCore, asked: Request, *, num_steps: int = 1000) -> list[int]:
    """The tokens of a request, or of its first steps."""
    core.add(asked)
    tokens = []
    for _ in range(num_steps):
        if not core.has_request(asked.request_id):
            break
        for output in core.step():
            tokens += output.token_ids
        core.scheduler.blocks.check_integrity()
    return tokens


def keys_of(core: EngineCore) -> list[bytes]:
    """Of the prompt's full blocks, in their order."""
    cache = core.scheduler.blocks.tiers.cache
    parents = {block.parent: block.key for block in cache if block.key is not None}
    keys: list[bytes] = []
    (key,) = parents.keys() - set(parents.values())  # the root
    while key in parents:
        key = parents[key]  # type: ignore[assignment]
        keys.append(key)
    return keys


def bytes_of(core: EngineCore) -> dict[bytes, bytes]:
    return {block.key: data for block, data in core.read_blocks(keys_of(core)) if block.key}


def copy(source: EngineCore, target: EngineCore) -> int:
    blocks = source.read_blocks(keys_of(source))
    for block, data in blocks:
        assert block.key is not None
        assert target.store_block(block.parent, block.tokens, block.key, data)
        target.scheduler.blocks.check_integrity()
    return len(blocks)


def test_a_stream_goes_on_from_another_engines_blocks(model: Path) -> None:
    (whole, _), (old, _), (new, _) = build(model), build(model), build(model)
    expected = run(whole, request())
    begun = run(old, request(), num_steps=10)
    assert 0 < len(begun) < len(expected)
    old.abort("r")
    num_blocks = copy(old, new)
    assert num_blocks == (len(_PROMPT) + len(begun) - 1) // _BLOCK_SIZE
    rest = run(new, request(output_token_ids=tuple(begun)))
    assert begun + rest == expected
    counters = new.scheduler.blocks.counters
    assert counters.prefix_host_hits == num_blocks * _BLOCK_SIZE
    # The same bytes, wherever they were computed, on the device by now.
    assert bytes_of(new).items() >= bytes_of(old).items()
    assert copy(old, new) == num_blocks  # they are known: nothing is written twice


def test_blocks_in_the_host_tier_are_sent_too(model: Path) -> None:
    old, _ = build(model, num_blocks=16)
    run(old, request())
    before = bytes_of(old)
    other = request("other", cache_salt="another's")  # takes all device blocks
    run(old, other, num_steps=3)
    cache = old.scheduler.blocks.tiers.cache
    blocks = [block for block in map(cache.get, before) if block is not None]
    assert any(block.device_id is None for block in blocks)
    keys = [block.key for block in blocks if block.key is not None]
    found = {block.key: data for block, data in old.read_blocks(keys)}
    assert found == {key: before[key] for key in keys}


def test_a_full_host_tier_takes_no_more(model: Path) -> None:
    (old, _), (new, _) = build(model), build(model, num_host_blocks=3)
    run(old, request())
    new.scheduler.blocks.tiers.host.allocate(3)  # as if sequences were parked there
    (block, data), *_ = old.read_blocks(keys_of(old))
    assert not new.store_block(block.parent, block.tokens, block.key or b"", data)


@pytest.mark.parametrize(
    "cache", [{"num_host_blocks": 0}, {"enable_prefix_caching": False}], ids=str
)
def test_without_room_for_prefixes_an_engine_takes_no_part(
    model: Path, cache: dict[str, Any]
) -> None:
    _, info = build(model, **cache)
    assert info.kv_root == b""


# -- on the wire -----------------------------------------------------------------------------------


class Served:
    """A core behind a real server, and a gateway that is connected to it."""

    def __init__(self, core: EngineCore, info: EngineInfo, address: str) -> None:
        self.core, self.info = core, info
        self.server = EngineServer(core, info, address, drain_s=PATIENCE_S)
        self.thread = threading.Thread(target=self.server.run)
        self.server.start()
        self.thread.start()
        self.gateway = Gateway(address)
        self.gateway.hello()

    def ask(self, message: FetchBlocks | KVBlocks) -> Any:
        self.gateway.send(message)
        while isinstance(answer := self.gateway.receive(), Step | Draining):
            pass
        return answer

    def close(self) -> None:
        self.gateway.socket.close()
        self.server.stop()
        self.server.stop()
        self.thread.join()


@pytest.fixture
def serve(model: Path, tmp_path: Path) -> Iterator[Callable[[], Served]]:
    with contextlib.ExitStack() as stack:

        def start() -> Served:
            served = Served(*build(model), f"{tmp_path}/{next(_NUMBERS)}.sock")
            stack.callback(served.close)
            return served

        yield start


def test_blocks_that_are_not_what_they_should_be_are_refused(
    serve: Callable[[], Served], caplog: pytest.LogCaptureFixture
) -> None:
    old, new = serve(), serve()
    old.gateway.submit("r", _PROMPT, max_tokens=2)
    old.gateway.finish("r")
    keys = tuple(keys_of(old.core))
    sent = old.ask(FetchBlocks(number=7, keys=(*keys[:3], b"unknown", *keys[3:])))
    assert (sent.number, len(sent.blocks)) == (7, 3)
    first, second, _ = sent.blocks
    flipped = bytes([first.data[0] ^ 1]) + first.data[1:]
    short = first.data[:-1]
    for wrong, why in (
        (replace(sent, kv_root=b"another model's"), "of another model, type or layout"),
        (_with(sent, replace(first, data=flipped)), "have changed on the way"),
        (_with(sent, replace(first, data=short, checksum=zlib.crc32(short))), "instead of"),
        (_with(sent, replace(first, tokens=second.tokens)), "not that of its tokens"),
        (_with(sent, replace(first, key=second.key)), "not that of its tokens"),
        (_with(sent, replace(first, parent=second.key)), "not that of its tokens"),
        (_with(sent, replace(first, tokens=first.tokens[:4])), "not that of its tokens"),
    ):
        caplog.clear()
        assert new.ask(wrong) == BlocksStored(number=7, num_blocks=0)
        assert why in caplog.text
    assert not list(new.core.scheduler.blocks.tiers.cache)
    assert new.ask(sent) == BlocksStored(number=7, num_blocks=3)
    new.gateway.submit("r", _PROMPT, max_tokens=2)
    new.gateway.finish("r")
    stats = new.server.transport.stats
    assert stats.num_kv_blocks_refused_total == 7 * 3
    assert stats.num_kv_blocks_received_total == 3
    assert stats.kv_received_bytes_total == 3 * new.info.num_block_bytes
    assert stats.prefix_cache_host_hits_total == 3 * _BLOCK_SIZE
    # Which are published after the answer is sent.
    wait_until(lambda: old.server.transport.stats.num_kv_blocks_sent_total == 3)


def _with(sent: KVBlocks, first: KVBlock) -> KVBlocks:
    return replace(sent, blocks=(first, *sent.blocks[1:]))


def test_an_engine_that_drains_waits_for_those_who_fetch(serve: Callable[[], Served]) -> None:
    old = serve()
    old.gateway.submit("r", _PROMPT, max_tokens=2)
    old.gateway.finish("r")
    keys = tuple(keys_of(old.core))
    old.server.stop()
    assert len(old.ask(FetchBlocks(number=1, keys=keys[:2])).blocks) == 2
    old.thread.join(timeout=5 * _LEAVE_S)
    assert old.thread.is_alive()
    assert len(old.ask(FetchBlocks(number=2, keys=keys[2:4])).blocks) == 2
    old.gateway.send(FetchBlocks(number=0))
    old.thread.join(timeout=PATIENCE_S)
    assert not old.thread.is_alive()
