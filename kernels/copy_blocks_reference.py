"""Copying whole blocks within the KV pool, in plain torch: the specification."""

from __future__ import annotations

from torch import Tensor


def copy_blocks_reference(pool: Tensor, sources: Tensor, destinations: Tensor) -> None:
    """Copy blocks in every layer, keys and values alike.

    Every source is read before any destination is written. Destinations are distinct.

    Args:
        pool: [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim], changed
        sources, destinations: int64 [num_copies], block ids
    """
    pool.index_copy_(2, destinations, pool.index_select(2, sources))
