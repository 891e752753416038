"""The sizes of the device's KV pool and of the host tier, and the pool's allocation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from penstock.engine.config import CacheConfig, EngineConfig
from penstock.engine.errors import ConfigError
from penstock.engine.models.language_model import StateSpec

_GIB = 1 << 30
_HOST_BYTES = {"cuda": 4 * _GIB, "cpu": _GIB}
_HOST_SHARE = 4  # a quarter of the free memory
_MAX_HOST_POOLS = 4  # times the device's pool: a small pool has little to swap out


class LastingMemory(Protocol):
    """Memory of a KV pool that outlives the engine (`engine.blocks.lasting_pool`)."""

    @property
    def num_used_bytes(self) -> int:
        """Bytes of memory that it takes already."""
        ...

    def num_blocks_left(self, layout: str) -> int | None:
        """Blocks of the pool that an engine left there with the same layout; None: none."""
        ...

    def map(
        self, layout: str, *, num_blocks: int, block_size: int, block_bytes: int
    ) -> memoryview | None:
        """The memory of a pool of so many blocks, with what an engine left; None: it cannot be."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """One block of the pool: block_size tokens of every layer, keys and values.

    Attributes:
        num_draft_bytes: what a draft model's pool takes for the same tokens.
    """

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    num_draft_bytes: int = 0

    @classmethod
    def of(cls, state_spec: StateSpec, block_size: int) -> KVShape:
        """The shape for a model's one group; windows of layers do not matter.

        Raises:
            ConfigError: layers differ in size, which one tensor cannot hold.
        """
        (layers,) = (group.layers for group in state_spec)
        sizes = {(layer.num_heads, layer.head_size, layer.dtype) for layer in layers}
        if len(sizes) > 1:
            raise ConfigError(
                "the model's layers store keys and values of different sizes: "
                "models with such layers are not supported"
            )
        ((num_heads, head_size, dtype),) = sizes
        return cls(
            num_layers=len(layers),
            block_size=block_size,
            num_kv_heads=num_heads,
            head_size=head_size,
            dtype=dtype,
        )

    @property
    def bytes_per_block(self) -> int:
        numbers = self.num_layers * 2 * self.block_size * self.num_kv_heads * self.head_size
        return numbers * self.dtype.itemsize + self.num_draft_bytes

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate(
        self, num_blocks: int, device: torch.device, memory: memoryview | None = None
    ) -> Tensor:
        """[num_layers, 2, num_blocks, block_size, num_kv_heads, head_size], uninitialised.

        Nothing is read before it is written; on a CPU pages are allocated at their first write.

        Args:
            memory: where it lies; None: in memory of its own.
        """
        plane = self.block_size, self.num_kv_heads, self.head_size
        shape = self.num_layers, 2, num_blocks, *plane
        if memory is not None:
            return torch.frombuffer(memory, dtype=torch.uint8).view(self.dtype).view(shape)
        try:
            return torch.empty(shape, dtype=self.dtype, device=device)
        except (RuntimeError, MemoryError) as error:
            num_bytes = num_blocks * self.bytes_per_block
            raise ConfigError(
                f"{num_blocks} blocks of KV cache need {num_bytes:,} bytes, more than {device} "
                "has free: lower --kv-cache-memory-bytes or --num-blocks"
            ) from error


def choose_num_blocks(
    config: CacheConfig,
    shape: KVShape,
    *,
    available_bytes: Callable[[], int],
    max_model_len: int,
    max_num_seqs: int,
    must_fit: bool = True,
) -> int:
    """Blocks in the pool: as configured, or as many as fit and could ever be used.

    Args:
        available_bytes: measures the memory for the pool; called if the config has no size.
        must_fit: a sequence of max_model_len tokens; otherwise one block is enough.

    Raises:
        ConfigError: a sequence of max_model_len tokens would not fit.
    """
    needed = shape.num_blocks_for(max_model_len)
    if config.num_blocks is not None:
        num_blocks = config.num_blocks
    elif config.kv_cache_memory_bytes is not None:
        num_blocks = config.kv_cache_memory_bytes // shape.bytes_per_block
    else:
        num_blocks = min(available_bytes() // shape.bytes_per_block, needed * max_num_seqs)
    if num_blocks < (needed if must_fit else 1):
        raise ConfigError(_too_small(shape, needed, max(num_blocks, 0), max_model_len))
    return num_blocks


def _too_small(shape: KVShape, needed: int, num_blocks: int, max_model_len: int) -> str:
    block = shape.bytes_per_block
    largest = num_blocks * shape.block_size
    advice = f"lower --max-model-len to at most {largest} or " if largest else ""
    return (
        f"one sequence of {max_model_len} tokens needs {needed * block:,} bytes of KV cache "
        f"({needed} blocks), but the pool has {num_blocks * block:,} bytes ({num_blocks} blocks): "
        f"{advice}raise --kv-cache-memory-bytes to at least {needed * block}"
    )


def uses_host_tier(config: EngineConfig) -> bool:
    """Whether there should be host blocks, and something would use them."""
    cache = config.cache
    size = cache.swap_space if cache.num_host_blocks is None else cache.num_host_blocks
    return size != 0 and (cache.enable_prefix_caching or config.scheduler.preemption != "recompute")


def choose_num_host_blocks(
    config: EngineConfig,
    shape: KVShape,
    *,
    num_blocks: int,
    free_bytes: int,
    device: torch.device,
    num_ranks: int = 1,
) -> int:
    """Blocks of the host tier: as configured, or a moderate number; 0 for none.

    Args:
        num_blocks: of the device's pool.
        free_bytes: free host memory.
        num_ranks: that share the configured size.

    Raises:
        ConfigError: the configured size exceeds the free memory.
    """
    if not uses_host_tier(config):
        return 0
    cache = config.cache
    if cache.num_host_blocks is not None:
        num_bytes, flag = cache.num_host_blocks * shape.bytes_per_block, "--num-host-blocks"
    elif cache.swap_space is not None:
        num_bytes, flag = int(cache.swap_space * _GIB) // num_ranks, "--swap-space"
    else:
        share = min(_HOST_BYTES[device.type], free_bytes // _HOST_SHARE)
        return min(share // shape.bytes_per_block, _MAX_HOST_POOLS * num_blocks)
    if num_bytes > free_bytes:
        raise ConfigError(
            f"the host tier of the KV cache would take {num_bytes:,} bytes, but this machine has "
            f"{free_bytes:,} bytes free besides the device's pool: lower {flag}"
        )
    return num_bytes // shape.bytes_per_block
