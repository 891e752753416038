"""One tier's fixed set of equal KV blocks: who is held, what is cached, what is empty.

The device's pool and the host's are two of these. Knows ids, counts and which content a block
has; nothing of sequences, hashes or the other tier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from penstock.engine.blocks.eviction import EvictionOrder
from penstock.engine.blocks.prefix_cache import CachedBlock


class BlockPool:
    """Blocks `0 … num_blocks - 1`, each in one of three states:

        held    ref_counts > 0
        cached  nobody holds it, but its content can still be found; may be evicted
        empty   nobody holds it and nobody will look for it

    Empty blocks are a stack: the block given back last is handed out first, while its memory is
    still warm in the caches. Cached ones are given up only when no empty one is left, in
    `EvictionOrder`. Every operation is O(1) per block, but for tagged ones (O(log n)).

    Args:
        clock: seconds, for retention.
        on_evict: told of a cached block before it is handed out anew; the content is then the
            caller's to keep elsewhere or to forget.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        clock: Callable[[], float],
        on_evict: Callable[[int, CachedBlock], None],
    ) -> None:
        self.num_blocks = num_blocks
        self.num_evictions = 0
        self.ref_counts = [0] * num_blocks
        self.contents: list[CachedBlock | None] = [None] * num_blocks
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._cached = EvictionOrder()
        self._clock = clock
        self._on_evict = on_evict

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could hand out."""
        return len(self._empty) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_available

    def allocate(self, num_blocks: int) -> list[int]:
        """Take blocks, each with one reference and no content. The caller has checked
        `num_available`."""
        assert 0 <= num_blocks <= self.num_available, "allocating more blocks than there are"
        if num_blocks == 0:
            return []
        taken = self._empty[-num_blocks:]
        del self._empty[-num_blocks:]
        taken.reverse()
        for block_id in taken:
            self.ref_counts[block_id] = 1
        while len(taken) < num_blocks:
            taken.append(self._evict())
        return taken

    def hold(self, block_id: int) -> None:
        """One more reference."""
        if self.ref_counts[block_id] == 0:
            self._cached.remove(block_id)  # KeyError: an empty block has nothing to hold
        self.ref_counts[block_id] += 1

    def release(self, block_id: int) -> None:
        """Drop one reference; without any, the block is cached if it has content, else empty."""
        count = self.ref_counts[block_id] - 1
        assert count >= 0, f"block {block_id} is freed twice"
        self.ref_counts[block_id] = count
        if count == 0:
            content = self.contents[block_id]
            if content is None:
                self._empty.append(block_id)
            else:
                self._cached.add(block_id, content.tag)

    def forget(self, block_id: int) -> None:
        """The block's content will not be looked for again."""
        self.contents[block_id] = None
        if self.ref_counts[block_id] == 0:
            self._cached.remove(block_id)
            self._empty.append(block_id)

    def _evict(self) -> int:
        block_id = self._cached.pop(self._clock())
        content = self.contents[block_id]
        assert content is not None, f"cached block {block_id} has no content"
        self.num_evictions += 1
        # Held before anybody is told: what is told may allocate.
        self.ref_counts[block_id] = 1
        self.contents[block_id] = None
        self._on_evict(block_id, content)
        return block_id

    def check_integrity(self, references: Iterable[int]) -> None:
        """Prove that each block is in exactly one state, held as often as `references` says.

        Args:
            references: every block id of every table, repeated as often as it is held.
        """
        counts = [0] * self.num_blocks
        for block_id in references:
            counts[block_id] += 1
        assert counts == self.ref_counts, "reference counts differ from the tables"
        empty = set(self._empty)
        assert len(empty) == len(self._empty), "a block is empty twice"
        assert len(empty) + len(self._cached) == counts.count(0), "a block is lost"
        for block_id, count in enumerate(counts):
            is_cached = block_id in self._cached
            assert (count > 0) + (block_id in empty) + is_cached == 1, f"states of {block_id}"
            assert not is_cached or self.contents[block_id] is not None, "cached without content"
            assert block_id not in empty or self.contents[block_id] is None, "empty, with content"
