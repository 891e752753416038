"""Copying whole blocks within the KV pool, in plain torch: the specification."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.kernels.reference.bits import as_bits


def copy_blocks_reference(pool: Tensor, copies: Sequence[tuple[int, int]]) -> None:
    """Copy blocks in every layer, keys and values alike.

    Every source is read before any destination is written. Destinations are distinct.

    Args:
        pool: [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim], modified
        copies: pairs of block ids (source, destination)
    """
    sources, destinations = torch.tensor(copies, device=pool.device).unbind(1)
    blocks = as_bits(pool)
    blocks.index_copy_(2, destinations, blocks.index_select(2, sources))
