"""Copying whole blocks within the KV pool: the launcher of `move_blocks`'s kernel."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from penstock.kernels.block_ids import block_ids_on
from penstock.kernels.gpu.move_blocks import (
    copy_within_pool,
    gather_blocks_triton,
    scatter_blocks_triton,
)

Copies = Sequence[tuple[int, int]]


def copy_blocks_triton(pool: Tensor, copies: Copies) -> None:
    """One launch, except for chains (a → b with b → c): programs of one launch run in any order, so
    blocks that would be overwritten are saved before and copied after."""
    destinations = {destination for _, destination in copies}
    chained = [pair for pair in copies if pair[0] in destinations]
    direct = [pair for pair in copies if pair[0] not in destinations]
    if chained:
        saved_ids, chained_ids = _columns(pool, chained)
        num_layers, _, _, *plane = pool.shape
        saved = pool.new_empty((len(chained), num_layers, 2, *plane))
        gather_blocks_triton(pool, saved_ids, saved)
    if direct:
        copy_within_pool(pool, *_columns(pool, direct))
    if chained:
        scatter_blocks_triton(saved, chained_ids, pool)


def _columns(pool: Tensor, copies: Copies) -> tuple[Tensor, Tensor]:
    """Sources and destinations, each int64 [num_copies] on the pool's device."""
    sources, destinations = zip(*copies, strict=True)
    both = block_ids_on(pool.device, [*sources, *destinations])
    return both[: len(copies)], both[len(copies) :]
