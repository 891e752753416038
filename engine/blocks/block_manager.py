"""Which blocks each sequence holds: the one door between scheduling and KV memory.

Only plans: what is written to a block, and when, is the device's business. A block given up here
may be handed out at once, because the device runs batches in order, so every step that touches
the block is ordered before its next writer.
"""

from __future__ import annotations

from penstock.engine.blocks.block_pool import BlockPool
from penstock.engine.blocks.block_table import BlockTable


class BlockManager:
    """Allocates blocks as sequences grow, and takes them back."""

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._pool = BlockPool(num_blocks)
        self._tables: dict[int, BlockTable] = {}

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free

    @property
    def num_used_blocks(self) -> int:
        return self._pool.num_blocks - self._pool.num_free

    def grow(self, seq_id: int, num_tokens: int, *, num_spared: int = 0) -> tuple[int, ...] | None:
        """Make room for `num_tokens` tokens in all; the new blocks, or None if too few are free.

        None changes nothing.

        Args:
            num_spared: blocks that must stay free.
        """
        table = self._tables.get(seq_id) or BlockTable(self.block_size)
        num_missing = table.num_missing_blocks(num_tokens)
        if num_missing + num_spared > self._pool.num_free:
            return None
        new = self._pool.allocate(num_missing)
        table.block_ids.extend(new)
        self._tables[seq_id] = table
        return tuple(new)

    def release(self, seq_id: int) -> None:
        """Give back all blocks of a sequence; one that holds none is no error."""
        table = self._tables.pop(seq_id, None)
        if table is not None:
            self._pool.release(table.block_ids)

    def block_ids(self, seq_id: int) -> tuple[int, ...]:
        table = self._tables.get(seq_id)
        return () if table is None else tuple(table.block_ids)

    def check_integrity(self) -> None:
        """Prove that every block is free or referenced exactly once per holder."""
        self._pool.check_integrity(
            block_id for table in self._tables.values() for block_id in table.block_ids
        )
