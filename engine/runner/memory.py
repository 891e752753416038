"""Memory for KV: how much to use where the config does not say, and its allocation.

On a CPU a modest share of the free memory, since other programs need some too. On a GPU everything
within `gpu_memory_utilization` except what weights, the largest forward pass and the graphs need,
which is measured.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.engine.config import FITTING_LEN, EngineConfig
from penstock.engine.errors import ConfigError
from penstock.engine.layers.attention import ForwardContext
from penstock.engine.model_files.free_memory import free_cpu_bytes
from penstock.engine.models.backends import in_torch
from penstock.engine.models.language_model import LanguageModel, LoadedModel
from penstock.engine.models.torch_model import TorchModel
from penstock.engine.parallel.ranks import ALONE, Ranks
from penstock.engine.runner.cuda_graphs import (
    CudaGraphMaker,
    GraphedModel,
    GraphSizes,
    graphs_num_bytes,
)
from penstock.engine.runner.device import resolve_cudagraph_mode
from penstock.engine.runner.kv_cache import (
    KVShape,
    LastingMemory,
    choose_num_blocks,
    choose_num_host_blocks,
    uses_host_tier,
)
from penstock.engine.runner.kv_swap import CUDA_STAGING, HostTier, NoHostTier

_MAX_CPU_BYTES = 2 << 30
_CPU_SHARE = 4  # a quarter of what is available
# What the reference attention may need for scores and gathers beyond the profiled forward pass,
# which has no context before it (see its own limits).
_ATTENTION_BYTES = 1 << 30


def allocate_pool(
    config: EngineConfig,
    model: LoadedModel,
    shape: KVShape,
    max_model_len: int,
    ranks: Ranks = ALONE,
    lasting_pool: LastingMemory | None = None,
) -> Tensor:
    """The device's pool, as in `KVShape.allocate`: of as many blocks as all ranks have room for.

    Args:
        lasting_pool: where it lies if there is room. What an engine left there is of the same size
            as its own, whatever is free by now.

    Raises:
        ConfigError: the pool is too small for max_model_len tokens, or too large for the memory.
    """
    device = model.device
    # Ranks on a CPU have all loaded their weights when they look at the memory that they share.
    ranks.minimum(0)
    num_sharing = ranks.size if device.type == "cpu" else 1
    num_blocks = None if lasting_pool is None else lasting_pool.num_blocks_left(str(shape))
    if num_blocks is None:
        num_blocks = choose_num_blocks(
            config.cache,
            shape,
            available_bytes=lambda: (
                available_bytes(config, model, shape, max_model_len) // num_sharing
            ),
            max_model_len=max_model_len,
            max_num_seqs=config.scheduler.max_num_seqs,
            must_fit=config.model.max_model_len != FITTING_LEN,
        )
    num_blocks = ranks.minimum(num_blocks)
    num_used_bytes = 0 if lasting_pool is None else lasting_pool.num_used_bytes
    _check_fits(num_blocks * shape.bytes_per_block * num_sharing - num_used_bytes, device)
    if lasting_pool is None:
        return shape.allocate(num_blocks, device)
    memory = lasting_pool.map(
        str(shape),
        num_blocks=num_blocks,
        block_size=shape.block_size,
        block_bytes=shape.bytes_per_block,
    )
    return shape.allocate(num_blocks, device, memory)


def allocate_host_tier(
    config: EngineConfig,
    shape: KVShape,
    pool: Tensor,
    ranks: Ranks = ALONE,
    *,
    num_used_bytes: int = 0,
) -> HostTier | NoHostTier:
    """The host tier, of which each rank has a part of every block.

    Args:
        num_used_bytes: of the pool's, which are not free any more.

    Raises:
        ConfigError: its configured size exceeds the free memory.
    """
    free = free_cpu_bytes() // config.device.num_sharing
    if pool.device.type == "cpu":
        # Allocated, but its pages are not in use yet.
        free = max(0, free - max(0, pool.nbytes * ranks.size - num_used_bytes))
    num_blocks = choose_num_host_blocks(
        config,
        shape,
        num_blocks=pool.shape[2],
        free_bytes=free // ranks.size,
        device=pool.device,
        num_ranks=ranks.size,
    )
    return make_host_tier(pool, ranks.minimum(num_blocks))


def make_host_tier(pool: Tensor, num_blocks: int) -> HostTier | NoHostTier:
    """A host tier of so many blocks for a device's pool."""
    return HostTier(pool, num_blocks) if num_blocks else NoHostTier(pool)


def available_bytes(
    config: EngineConfig, model: LoadedModel, shape: KVShape, max_model_len: int
) -> int:
    """Bytes for the KV pool on the model's device."""
    device = model.device
    if device.type != "cuda":
        free = free_cpu_bytes() // config.device.num_sharing
        # Experts that are still to be read; where they are too many, they will be mapped.
        return cpu_pool_bytes(max(free - model.expected_bytes, free // _CPU_SHARE))
    runs = in_torch(model)
    peak = _profile_peak_bytes(config, model, runs, shape)
    if isinstance(runs, TorchModel):
        peak += _profile_graphs_bytes(config, runs, shape, max_model_len, device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    # `free` excludes other programs' memory, so it counts against our share.
    reserve = int(total * (1 - config.cache.gpu_memory_utilization)) + _ATTENTION_BYTES
    staging = CUDA_STAGING.num_bytes if uses_host_tier(config) else 0
    return max(0, free - reserve - staging - peak)


def cpu_pool_bytes(free: int) -> int:
    """Bytes for the KV pool on a CPU, of so many that are free beside the weights."""
    return min(_MAX_CPU_BYTES, free // _CPU_SHARE)


@torch.inference_mode()
def _profile_peak_bytes(
    config: EngineConfig, model: LoadedModel, runs: LanguageModel, shape: KVShape
) -> int:
    """Peak memory of a full step's forward pass, besides weights and KV pool."""
    device = model.device
    num_tokens = min(config.scheduler.max_num_batched_tokens, model.context_len)
    pool = shape.allocate(shape.num_blocks_for(num_tokens), device)
    context = ForwardContext.of_sequence(pool, num_tokens)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    hidden = runs(torch.zeros_like(context.positions), context)
    # Sampling holds a few float64 copies of the logits.
    rows = min(config.scheduler.max_num_seqs, num_tokens)
    logits = runs.logits(hidden[:rows]).double()
    logits.softmax(-1).cumsum(-1)
    return torch.cuda.max_memory_allocated(device) - before


def _profile_graphs_bytes(
    config: EngineConfig, model: TorchModel, shape: KVShape, max_model_len: int,
    device: torch.device,
) -> int:  # fmt: skip
    """Memory of the graphs that will be captured, from capturing some of them."""
    pool = shape.allocate(1, device)

    def capture(sizes: GraphSizes) -> GraphedModel:
        max_blocks = shape.num_blocks_for(max_model_len)
        return GraphedModel(model, pool, sizes, CudaGraphMaker(), max_blocks=max_blocks)

    def used_bytes() -> int:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return total - free

    mode = resolve_cudagraph_mode(config.device, device)
    return graphs_num_bytes(GraphSizes.of(mode, config.scheduler), capture, used_bytes)


def _check_fits(num_bytes: int, device: torch.device) -> None:
    """Refuse a pool larger than the free memory: Linux would grant it, and kill the process later.

    Raises:
        ConfigError: with the numbers.
    """
    free = free_cpu_bytes()
    if device.type == "cpu" and num_bytes > free:
        raise ConfigError(
            f"the KV cache would take {num_bytes:,} bytes, but this machine has {free:,} bytes "
            "free: lower --kv-cache-memory-bytes or --num-blocks"
        )
