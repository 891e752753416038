"""The fixed set of equal KV blocks and who holds how many references to each.

Knows ids and counts, nothing of sequences or of what a block contains.
"""

from __future__ import annotations

from collections.abc import Iterable


class BlockPool:
    """Blocks `0 … num_blocks - 1`, each free or referenced by at least one table.

    The free list is a stack: the block given back last is handed out first, while its memory is
    still warm in the caches. Both ends of every operation are O(1) per block.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, num_blocks: int) -> list[int]:
        """Take blocks, each with one reference. The caller has checked `num_free`."""
        assert 0 <= num_blocks <= len(self._free), "allocating more blocks than are free"
        if num_blocks == 0:
            return []
        taken = self._free[-num_blocks:]
        del self._free[-num_blocks:]
        taken.reverse()
        for block_id in taken:
            self._ref_counts[block_id] = 1
        return taken

    def release(self, block_ids: Iterable[int]) -> None:
        """Drop one reference to each; a block without references is free."""
        for block_id in block_ids:
            count = self._ref_counts[block_id]
            assert count > 0, f"block {block_id} is freed twice"
            self._ref_counts[block_id] = count - 1
            if count == 1:
                self._free.append(block_id)

    def check_integrity(self, references: Iterable[int]) -> None:
        """Prove that each block is free or referenced, exactly as often as `references` says.

        Args:
            references: every block id of every table, repeated as often as it is held.
        """
        counts = [0] * self.num_blocks
        for block_id in references:
            counts[block_id] += 1
        assert counts == self._ref_counts, "reference counts differ from the tables"
        assert len(set(self._free)) == len(self._free), "a block is on the free list twice"
        is_free = [count == 0 for count in counts]
        assert sum(is_free) == len(self._free), "a block is neither free nor referenced"
        assert all(is_free[block_id] for block_id in self._free), "a block in use is marked free"
