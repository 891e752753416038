"""Copying whole blocks within the KV pool: checks shapes, picks the implementation.

The meaning is specified by `copy_blocks_reference`, so far the only implementation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.kernels.copy_blocks_reference import copy_blocks_reference


def copy_blocks(pool: Tensor, copies: Sequence[tuple[int, int]]) -> None:
    """Run (source, destination) copies of blocks in every layer.

    Args:
        pool: [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim], changed
        copies: pairs of block ids; all sources are read before any destination is written.
    """
    assert pool.dim() == 6, f"pool {tuple(pool.shape)}"
    if not copies:
        return
    pairs = torch.tensor(copies, dtype=torch.int64)
    assert pairs.min() >= 0, f"negative block in {copies}"
    assert pairs.max() < pool.shape[2], f"block beyond the pool's {pool.shape[2]} in {copies}"
    assert len({copy[1] for copy in copies}) == len(copies), f"destination named twice in {copies}"
    sources, destinations = pairs.to(pool.device).unbind(1)
    copy_blocks_reference(pool, sources, destinations)
