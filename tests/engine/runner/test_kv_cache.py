"""The sizes of the KV pool and of the host tier, and what is said when memory does not do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.engine.config import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
)
from penstock.engine.errors import ConfigError
from penstock.engine.model_files.free_memory import free_cpu_bytes
from penstock.engine.models.language_model import LayerKV, PagedKV
from penstock.engine.models.loader import load_model
from penstock.engine.runner.kv_cache import KVShape, choose_num_blocks, choose_num_host_blocks
from penstock.engine.runner.memory import available_bytes
from penstock.engine.runner.model_runner import ModelRunner

# 2 layers × 2 × 16 tokens × 2 heads × 8 numbers × 4 bytes
SHAPE = KVShape(num_layers=2, block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32)
BLOCK = 4096


def choose(
    config: CacheConfig, *, available: int = 100 * BLOCK, max_model_len: int = 160, seqs: int = 8
) -> int:
    return choose_num_blocks(
        config,
        SHAPE,
        available_bytes=lambda: available,
        max_model_len=max_model_len,
        max_num_seqs=seqs,
    )


def test_bytes():
    assert SHAPE.bytes_per_block == BLOCK
    pool = SHAPE.allocate(3, torch.device("cpu"))
    assert pool.nbytes == 3 * BLOCK
    assert pool.shape == (2, 2, 3, 16, 2, 8)
    half = KVShape(num_layers=2, block_size=16, num_kv_heads=2, head_size=8, dtype=torch.bfloat16)
    assert half.bytes_per_block == BLOCK // 2


def layer(**changes: Any) -> LayerKV:
    sizes = {"num_heads": 2, "head_size": 8, "dtype": torch.float32, "window": None}
    return LayerKV(**(sizes | changes))


def test_layers_may_differ_in_their_windows():
    assert KVShape.of((PagedKV((layer(), layer(window=5))),), 16) == SHAPE


@pytest.mark.parametrize(
    "changes", [{"num_heads": 4}, {"head_size": 16}, {"dtype": torch.float8_e4m3fn}]
)
def test_layers_of_different_sizes_are_refused(changes):
    with pytest.raises(ConfigError, match="layers store keys and values of different sizes"):
        KVShape.of((PagedKV((layer(), layer(**changes))),), 16)


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks"), [(1, 1), (16, 1), (17, 2), (160, 10), (161, 11)]
)
def test_blocks_of_tokens(num_tokens, num_blocks):
    assert SHAPE.num_blocks_for(num_tokens) == num_blocks


def test_by_default_what_is_available_but_no_more_than_can_be_used():
    assert choose(CacheConfig()) == 80
    assert choose(CacheConfig(), seqs=100) == 100
    assert choose(CacheConfig(), available=10 * BLOCK + 5) == 10


def test_what_is_asked_for():
    assert choose(CacheConfig(num_blocks=1000)) == 1000
    assert choose(CacheConfig(kv_cache_memory_bytes=50 * BLOCK + 7)) == 50
    assert choose(CacheConfig(num_blocks=11, kv_cache_memory_bytes=BLOCK)) == 11


@pytest.mark.parametrize(
    ("config", "available"),
    [
        (CacheConfig(num_blocks=9), 0),
        (CacheConfig(kv_cache_memory_bytes=10 * BLOCK - 1), 0),
        (CacheConfig(), 10 * BLOCK - 1),
    ],
)
def test_a_context_that_does_not_fit(config, available):
    with pytest.raises(ConfigError) as caught:
        choose(config, available=available)
    message = str(caught.value)
    for part in (
        "160 tokens needs 40,960 bytes",
        "10 blocks",
        "36,864 bytes (9 blocks)",
        "--max-model-len to at most 144",
        "--kv-cache-memory-bytes to at least 40960",
    ):
        assert part in message, message


def test_a_pool_without_room_for_a_block():
    with pytest.raises(ConfigError, match=r"0 bytes \(0 blocks\): raise --kv-cache-memory-bytes"):
        choose(CacheConfig(kv_cache_memory_bytes=5))


def test_the_advice_works(tiny_checkpoint):
    path = tiny_checkpoint(max_position_embeddings=1000)
    with pytest.raises(ConfigError) as caught:
        ModelRunner(EngineConfig(cache=CacheConfig(kv_cache_memory_bytes=65536)), path)
    num_bytes = int(str(caught.value).rpartition(" ")[2])
    info = ModelRunner(EngineConfig(cache=CacheConfig(kv_cache_memory_bytes=num_bytes)), path).info
    assert info.num_blocks == 63


def test_cpu_share(tiny_checkpoint):
    model = load_model(ModelConfig(), tiny_checkpoint(), torch.device("cpu"))
    num_bytes = available_bytes(EngineConfig(), model, SHAPE, 64)
    assert 0 < num_bytes <= 2 << 30


# -- the host tier --------------------------------------------------------------------------

GIB = 1 << 30
BLOCKS_PER_GIB = GIB // BLOCK


def choose_host(
    config: EngineConfig, *, free: int = 64 * GIB, num_blocks: int = 1 << 20, device: str = "cpu"
) -> int:
    return choose_num_host_blocks(
        config,
        SHAPE,
        num_blocks=num_blocks,
        free_bytes=free,
        device=torch.device(device),
    )


@pytest.mark.parametrize(
    ("options", "blocks"),
    [
        ({}, BLOCKS_PER_GIB),
        ({"device": "cuda"}, 4 * BLOCKS_PER_GIB),
        ({"free": 2 * GIB}, BLOCKS_PER_GIB // 2),
        ({"free": 2 * GIB, "device": "cuda"}, BLOCKS_PER_GIB // 2),
        ({"num_blocks": 100}, 400),
        ({"free": 0}, 0),
    ],
)
def test_the_host_tier_is_moderate_by_default(options, blocks):
    assert choose_host(EngineConfig(), **options) == blocks


@pytest.mark.parametrize(
    ("cache", "blocks"),
    [
        (CacheConfig(swap_space=20), 20 * BLOCKS_PER_GIB),
        (CacheConfig(swap_space=1.5 / BLOCKS_PER_GIB), 1),
        (CacheConfig(num_host_blocks=12345), 12345),
        (CacheConfig(num_host_blocks=3, swap_space=0), 3),
        (CacheConfig(num_host_blocks=0, swap_space=2), 0),
        (CacheConfig(swap_space=0), 0),
    ],
)
def test_the_host_tier_that_is_asked_for(cache, blocks):
    assert choose_host(EngineConfig(cache=cache), num_blocks=10) == blocks


@pytest.mark.parametrize(
    ("caching", "preemption", "is_wanted"),
    [
        (True, "auto", True),
        (False, "auto", True),
        (False, "swap", True),
        (True, "recompute", True),
        (False, "recompute", False),
    ],
)
def test_nothing_is_taken_that_nothing_would_use(caching, preemption, is_wanted):
    config = EngineConfig(
        cache=CacheConfig(enable_prefix_caching=caching, num_host_blocks=7),
        scheduler=SchedulerConfig(preemption=preemption),
    )
    assert choose_host(config) == (7 if is_wanted else 0)


@pytest.mark.parametrize(
    ("cache", "flag"),
    [
        (CacheConfig(num_host_blocks=BLOCKS_PER_GIB), "--num-host-blocks"),
        (CacheConfig(swap_space=1), "--swap-space"),
    ],
)
def test_a_host_tier_beyond_what_is_free(cache, flag):
    config = EngineConfig(cache=cache)
    assert choose_host(config, free=GIB) == BLOCKS_PER_GIB
    with pytest.raises(ConfigError, match=f"1,073,741,824 bytes.*1,073,741,823.*lower {flag}"):
        choose_host(config, free=GIB - 1)


def test_the_device_pool_counts_against_the_machine(tiny_checkpoint):
    """On a CPU both tiers lie in the same memory, and neither is touched yet."""
    pool_blocks = free_cpu_bytes() * 2 // 3 // BLOCK
    cache = CacheConfig(num_blocks=pool_blocks, num_host_blocks=pool_blocks)
    config = EngineConfig(cache=cache, device=DeviceConfig(device="cpu"))
    with pytest.raises(ConfigError, match=r"host tier.*lower --num-host-blocks"):
        ModelRunner(config, tiny_checkpoint(num_attention_heads=8, head_dim=8))


def test_the_runner_says_what_it_has(tiny_checkpoint):
    for num_host_blocks in (0, 9):
        config = EngineConfig(
            cache=CacheConfig(num_blocks=20, num_host_blocks=num_host_blocks),
            device=DeviceConfig(device="cpu"),
        )
        info = ModelRunner(config, tiny_checkpoint()).info
        assert info.num_host_blocks == num_host_blocks
        assert info.bytes_per_block == 2 * 2 * 16 * 2 * 16 * 4
        assert (info.block_move_s > 0) == (num_host_blocks > 0)
