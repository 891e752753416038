"""Moving blocks between the KV pool and a staging buffer, in plain torch: the specification.

In the pool a block consists of pieces, one for each layer's keys and one for its values; in the
buffer, as in host memory, a block is contiguous. Bits are moved unchanged, NaN payloads too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.reference.bits import as_bits


def gather_blocks_reference(pool: Tensor, block_ids: Tensor, staging: Tensor) -> None:
    """staging[i] = block block_ids[i] of the pool.

    Args:
        pool: [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim]
        block_ids: int64 [n]
        staging: [n, num_layers, 2, block_size, num_kv_heads, head_dim], modified
    """
    torch.index_select(_by_block(pool), 0, block_ids, out=as_bits(staging))


def scatter_blocks_reference(staging: Tensor, block_ids: Tensor, pool: Tensor) -> None:
    """Block block_ids[i] of the pool = staging[i]; arguments as in `gather_blocks_reference`, but
    ids must be distinct, and the pool is modified."""
    _by_block(pool).index_copy_(0, block_ids, as_bits(staging))


def _by_block(pool: Tensor) -> Tensor:
    return as_bits(pool).permute(2, 0, 1, 3, 4, 5)
