"""Copying whole blocks within the KV pool: checks shapes, picks the implementation.

The meaning is specified by `copy_blocks_reference`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from penstock.kernels.gpu_operations import gpu_operation
from penstock.kernels.reference.copy_blocks import copy_blocks_reference


def copy_blocks(pool: Tensor, copies: Sequence[tuple[int, int]]) -> None:
    """Run (source, destination) copies of blocks in every layer.

    Args:
        pool: [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim], modified
        copies: pairs of block ids; all sources are read before any destination is written.
    """
    assert pool.dim() == 6, f"pool {tuple(pool.shape)}"
    if not copies:
        return
    num_blocks = pool.shape[2]
    for pair in copies:
        assert min(pair) >= 0, f"negative block in {copies}"
        assert max(pair) < num_blocks, f"block beyond the pool's {num_blocks} in {copies}"
    assert len({copy[1] for copy in copies}) == len(copies), f"destination named twice in {copies}"
    run = gpu_operation("copy_blocks") if pool.is_cuda else copy_blocks_reference
    run(pool, copies)
