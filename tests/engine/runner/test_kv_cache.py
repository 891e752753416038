"""The size of the KV pool, and what is said when it cannot hold one context."""

from __future__ import annotations

import pytest
import torch

from penstock.engine.config import CacheConfig, EngineConfig, ModelConfig
from penstock.engine.errors import ConfigError
from penstock.engine.models.loader import load_model
from penstock.engine.runner.kv_cache import KVShape, choose_num_blocks
from penstock.engine.runner.memory import available_bytes
from penstock.engine.runner.model_runner import ModelRunner

# 2 layers × 2 × 16 tokens × 2 heads × 8 numbers × 4 bytes
SHAPE = KVShape(num_layers=2, block_size=16, num_kv_heads=2, head_dim=8, dtype=torch.float32)
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
    half = KVShape(num_layers=2, block_size=16, num_kv_heads=2, head_dim=8, dtype=torch.bfloat16)
    assert half.bytes_per_block == BLOCK // 2


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
    num_bytes = available_bytes(EngineConfig(), model, SHAPE)
    assert 0 < num_bytes <= 2 << 30
