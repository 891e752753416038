"""A sequence's positions mapped to blocks: position p lies in block `p // block_size`.

Source: PagedAttention (Kwon et al., SOSP 2023), section 4.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class BlockTable:
    """The blocks of one sequence in order of position.

    Attributes:
        root: where its chain of keys begins.
        keys: of its full blocks, as far as they were needed.
        is_swapped: the ids are the host tier's.
        is_tail_borrowed: the last block is partly filled and was filled by another sequence, which
            may go on writing behind what is shared: it is copied before it is written.
    """

    block_size: int
    root: bytes = b""
    block_ids: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    is_swapped: bool = False
    is_tail_borrowed: bool = False

    @property
    def capacity_tokens(self) -> int:
        return len(self.block_ids) * self.block_size

    def num_missing_blocks(self, num_tokens: int) -> int:
        """Blocks to append before `num_tokens` positions fit: the 17th token takes a second."""
        return max(0, -(-num_tokens // self.block_size) - len(self.block_ids))
