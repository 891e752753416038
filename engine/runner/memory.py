"""How much memory the KV pool may take where nobody said: what is free, less what is needed.

On a CPU a modest share, since other programs live there too. On a GPU everything within
`gpu_memory_utilization` that weights and the largest forward pass leave, which is measured.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from penstock.engine.config import EngineConfig
from penstock.engine.errors import ConfigError
from penstock.engine.layers.attention import ForwardContext
from penstock.engine.models.decoder import Decoder
from penstock.engine.runner.kv_cache import KVShape
from penstock.kernels.paged_layout import PagedLayout

_MAX_CPU_BYTES = 2 << 30
_CPU_SHARE = 4  # a quarter of what is available
# What the reference attention may take for scores and gathers beyond the profiled forward, which
# has no context before it (see its own limits).
_ATTENTION_BYTES = 1 << 30


def check_fits(num_bytes: int, device: torch.device) -> None:
    """Refuse a pool beyond what the machine has free: a CPU would lend it, and kill us later.

    Raises:
        ConfigError: with the numbers.
    """
    free = free_cpu_bytes()
    if device.type == "cpu" and num_bytes > free:
        raise ConfigError(
            f"the KV cache would take {num_bytes:,} bytes, but this machine has {free:,} bytes "
            "free: lower --kv-cache-memory-bytes or --num-blocks"
        )


def available_bytes(config: EngineConfig, model: Decoder, shape: KVShape) -> int:
    """Bytes for the KV pool on the device the model is on."""
    device = model.norm.weight.device
    if device.type != "cuda":
        return min(_MAX_CPU_BYTES, free_cpu_bytes() // _CPU_SHARE)
    peak = _profile_peak_bytes(config, model, shape)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    # Other programs' memory counts against the share: it is not there to be had.
    reserve = int(total * (1 - config.cache.gpu_memory_utilization)) + _ATTENTION_BYTES
    return max(0, free - reserve - peak)


@torch.inference_mode()
def _profile_peak_bytes(config: EngineConfig, model: Decoder, shape: KVShape) -> int:
    """Memory a forward takes at most beside weights and KV pool: one of a full step's tokens."""
    device = model.norm.weight.device
    num_tokens = min(config.scheduler.max_num_batched_tokens, model.config.context_len)
    num_blocks = shape.num_blocks_for(num_tokens)
    positions = torch.arange(num_tokens, device=device)
    layout = PagedLayout(
        query_start_loc=torch.tensor([0, num_tokens], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([num_tokens], dtype=torch.int32, device=device),
        block_tables=torch.arange(num_blocks, dtype=torch.int32, device=device)[None],
        slot_mapping=positions,
        max_query_len=num_tokens,
        max_seq_len=num_tokens,
    )
    pool = shape.allocate(num_blocks, device)
    context = ForwardContext(
        kv_pool=pool,
        layout=layout,
        positions=positions,
        prompt_lens=torch.full_like(positions, num_tokens),
    )
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    hidden = model(torch.zeros_like(positions), context)
    # Sampling holds a few float64 copies of the logits beside the model's own.
    rows = min(config.scheduler.max_num_seqs, num_tokens)
    logits = model.logits(hidden[:rows]).double()
    logits.softmax(-1).cumsum(-1)
    return torch.cuda.max_memory_allocated(device) - before


def free_cpu_bytes() -> int:
    """Free memory of the machine, or of the control group we run in if that has less."""
    free = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    free.extend(
        int(line.split()[1]) * 1024
        for line in _lines(Path("/proc/meminfo"))
        if line.startswith("MemAvailable:")
    )
    group = Path("/sys/fs/cgroup")
    limit, used = (_lines(group / name) for name in ("memory.max", "memory.current"))
    if limit and used and limit[0] != "max":
        free.append(max(0, int(limit[0]) - int(used[0])))
    return min(free)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
