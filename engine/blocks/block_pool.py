"""One tier's fixed set of equal KV blocks: which are held, which are cached, which are empty.

Device and host have one pool each. A pool keeps ids, reference counts and each block's content.
`EvictionOrder` decides which cached block is evicted first.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable

from penstock.engine.blocks.prefix_cache import CachedBlock, Tag


class BlockPool:
    """Blocks `0 … num_blocks - 1`, each in one of three states:

        held    ref_counts > 0
        cached  not held, but its content can still be found; may be evicted
        empty   not held, without content

    Empty blocks are a stack: the block freed last is handed out first, while its memory is still
    in the CPU's caches. Cached ones are evicted only when no empty one is left, in
    `EvictionOrder`. Every operation is O(1) per block, except for tagged ones (O(log n)).

    Args:
        clock: seconds, for retention.
        on_evict: called with a cached block before it is reused; it must keep the content
            elsewhere or forget it.
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
        """Allocate blocks, each with one reference and no content. The caller must check
        `num_available` first."""
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

    def incref(self, block_id: int) -> None:
        """Add a reference to a held or cached block."""
        if self.ref_counts[block_id] == 0:
            self._cached.remove(block_id)  # KeyError if the block is empty
        self.ref_counts[block_id] += 1

    def release(self, block_id: int) -> None:
        """Drop one reference; after the last, the block is cached if it has content, else empty."""
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
        """Remove the block's content; if nothing holds the block, it is empty."""
        self.contents[block_id] = None
        if self.ref_counts[block_id] == 0:
            self._cached.remove(block_id)
            self._empty.append(block_id)

    def _evict(self) -> int:
        block_id = self._cached.pop(self._clock())
        content = self.contents[block_id]
        assert content is not None, f"cached block {block_id} has no content"
        self.num_evictions += 1
        # Held before the callback, which may allocate.
        self.ref_counts[block_id] = 1
        self.contents[block_id] = None
        self._on_evict(block_id, content)
        return block_id

    def check_integrity(self, references: Iterable[int]) -> None:
        """Assert that each block is in exactly one state, held as often as `references` says.

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


class EvictionOrder:
    """The order in which cached blocks are evicted: a set of ids with a next victim.

    First blocks whose retention has expired, then those without retention, then retained ones,
    lowest priority first; each group by least recent use. Nothing is pinned: the last group is
    evicted too.

    `OrderedDict` is a hash table over a doubly linked list, so adding, removing from the middle
    and popping the oldest are O(1); blocks with a tag cost an additional O(log n).
    """

    def __init__(self) -> None:
        self._expired: OrderedDict[int, None] = OrderedDict()
        self._plain: OrderedDict[int, None] = OrderedDict()
        self._wanted: dict[int, OrderedDict[int, None]] = {}  # by priority
        self._tags: dict[int, Tag] = {}  # of the blocks in `_wanted`
        self._deadlines: list[tuple[float, int]] = []  # stale entries are skipped

    def __len__(self) -> int:
        return len(self._plain) + len(self._expired) + len(self._tags)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._plain or block_id in self._tags or block_id in self._expired

    def add(self, block_id: int, tag: Tag | None = None) -> None:
        """Add a block that was just released."""
        if tag is None:
            self._plain[block_id] = None
            return
        self._tags[block_id] = tag
        self._wanted.setdefault(tag.priority, OrderedDict())[block_id] = None
        heapq.heappush(self._deadlines, (tag.expires_s, block_id))
        if len(self._deadlines) > 2 * len(self._tags) + 64:  # mostly stale entries
            self._deadlines = [(known.expires_s, each) for each, known in self._tags.items()]
            heapq.heapify(self._deadlines)

    def remove(self, block_id: int) -> None:
        """Remove a block that is held again; KeyError if it is not in the set."""
        if block_id in self._plain:
            del self._plain[block_id]
        elif block_id in self._tags:
            self._remove_wanted(block_id)
        else:
            del self._expired[block_id]

    def pop(self, now_s: float) -> int:
        """Remove and return the next victim; KeyError if there is none."""
        self._expire(now_s)
        for group in (self._expired, self._plain):
            if group:
                return group.popitem(last=False)[0]
        if not self._wanted:
            raise KeyError("no block to evict")
        block_id = next(iter(self._wanted[min(self._wanted)]))
        self._remove_wanted(block_id)
        return block_id

    def _remove_wanted(self, block_id: int) -> None:
        tag = self._tags.pop(block_id)
        group = self._wanted[tag.priority]
        del group[block_id]
        if not group:
            del self._wanted[tag.priority]

    def _expire(self, now_s: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now_s:
            expires_s, block_id = heapq.heappop(self._deadlines)
            tag = self._tags.get(block_id)
            if tag is not None and tag.expires_s == expires_s:
                self._remove_wanted(block_id)
                self._expired[block_id] = None
