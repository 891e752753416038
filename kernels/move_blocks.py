"""Moving blocks between the KV pool and a staging buffer: checks, picks the implementation.

The meaning is specified by `kernels.reference.move_blocks`. On a GPU each is one launch, so a swap
is one launch and one copy over the link for each run of neighbouring host blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.gpu_operations import gpu_operation
from penstock.kernels.reference.move_blocks import (
    gather_blocks_reference,
    scatter_blocks_reference,
)


def gather_blocks(pool: Tensor, block_ids: Tensor, staging: Tensor) -> None:
    """Pack blocks of the pool into `staging`; arguments as in `gather_blocks_reference`."""
    _check(pool, block_ids, staging)
    run = gpu_operation("gather_blocks", "move_blocks") if pool.is_cuda else gather_blocks_reference
    run(pool, block_ids, staging)


def scatter_blocks(staging: Tensor, block_ids: Tensor, pool: Tensor) -> None:
    """Unpack `staging` into blocks of the pool; arguments as in `scatter_blocks_reference`."""
    _check(pool, block_ids, staging)
    is_gpu = pool.is_cuda
    run = gpu_operation("scatter_blocks", "move_blocks") if is_gpu else scatter_blocks_reference
    run(staging, block_ids, pool)


def _check(pool: Tensor, block_ids: Tensor, staging: Tensor) -> None:
    assert pool.dim() == 6, f"pool {tuple(pool.shape)}"
    assert staging.shape == (len(block_ids), *pool.shape[:2], *pool.shape[3:]), (
        f"staging {tuple(staging.shape)} for {len(block_ids)} blocks of {tuple(pool.shape)}"
    )
    assert staging.dtype == pool.dtype, f"{pool.dtype} and {staging.dtype}"
    assert pool.is_contiguous()
    assert staging.is_contiguous()
    assert block_ids.dtype == torch.int64, f"block ids in {block_ids.dtype}"
