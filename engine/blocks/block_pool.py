"""One tier's fixed set of equal KV blocks: which are held, which are cached, which are empty.

Device and host have one pool each. A pool keeps ids, reference counts and each block's content.
`EvictionOrder` decides which cached block is evicted first.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable

from penstock.engine.blocks.prefix_cache import CachedBlock, Hold, Tag


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
        cached: contents at the start, with their `device_id`; the first is evicted first.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        clock: Callable[[], float],
        on_evict: Callable[[int, CachedBlock], None],
        cached: Iterable[CachedBlock] = (),
    ) -> None:
        self.num_blocks = num_blocks
        self.num_evictions = 0
        self.num_held_evictions = 0  # of blocks of sessions that were expected back
        self.ref_counts = [0] * num_blocks
        self.contents: list[CachedBlock | None] = [None] * num_blocks
        self._cached = EvictionOrder()
        for block in cached:
            assert block.device_id is not None
            self.contents[block.device_id] = block
            self._cached.add(block.device_id, None, None)
        self._empty = [i for i in range(num_blocks - 1, -1, -1) if self.contents[i] is None]
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
    def num_all_expected(self) -> int:
        """Cached blocks of sessions that are expected back, or were so at the last eviction."""
        return self._cached.num_all_expected

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
                self._cached.add(block_id, content.tag, content.hold)

    def forget(self, block_id: int) -> None:
        """Remove the block's content; if nothing holds the block, it is empty."""
        self.contents[block_id] = None
        if self.ref_counts[block_id] == 0:
            self._cached.remove(block_id)
            self._empty.append(block_id)

    def num_expected(self, tenant: str, *, persons: bool) -> int:
        """Cached blocks of a tenant's sessions that are expected back.

        Args:
            persons: those of persons, else those of agents.
        """
        return self._cached.num_expected(tenant, self._clock(), persons=persons)

    def end_hold(self, hold: Hold) -> None:
        """Treat the cached blocks of a hold like others."""
        self._cached.end_hold(hold)

    def place(self, block_id: int) -> None:
        """Put a block, if it is cached, where its content's tag and hold say."""
        content = self.contents[block_id]
        if self.ref_counts[block_id] == 0 and content is not None:
            self._cached.remove(block_id)
            self._cached.add(block_id, content.tag, content.hold)

    def _evict(self) -> int:
        block_id = self._cached.pop(self._clock())
        content = self.contents[block_id]
        assert content is not None, f"cached block {block_id} has no content"
        self.num_evictions += 1
        if content.hold is not None:
            self.num_held_evictions += not content.hold.is_over
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


_End = tuple[float, int, Hold]  # when a hold ends, and a number that no other has


class EvictionOrder:
    """The order in which cached blocks are evicted: a set of ids with a next victim.

    First blocks whose retention has expired, then those without retention, then retained ones,
    lowest priority first; each group by least recent use. Blocks of sessions that are expected back
    come after all but those of a priority above 0; the hold that ends first is evicted first, from
    the turn's end, so that what is left of it can still be found. Nothing is pinned: the last group
    is evicted too.

    `OrderedDict` is a hash table over a doubly linked list, so adding, removing from the middle
    and popping the oldest are O(1); blocks with a tag cost an additional O(log n), and each hold.
    """

    def __init__(self) -> None:
        self._expired: OrderedDict[int, None] = OrderedDict()
        self._plain: OrderedDict[int, None] = OrderedDict()
        self._wanted: dict[int, OrderedDict[int, None]] = {}  # by priority
        self._tags: dict[int, Tag] = {}  # of the blocks in `_wanted`
        self._deadlines: list[tuple[float, int]] = []  # stale entries are skipped
        self._holds: dict[int, Hold] = {}  # of the blocks in `_held`
        self._held: dict[Hold, OrderedDict[int, Tag | None]] = {}
        # When holds end, agents' and persons'; stale entries are skipped.
        self._ends: tuple[list[_End], list[_End]] = ([], [])
        self._num_expected = Counter[tuple[str, bool]]()  # blocks in `_held`
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._plain) + len(self._expired) + len(self._tags) + len(self._holds)

    def __contains__(self, block_id: int) -> bool:
        groups = (self._plain, self._tags, self._expired, self._holds)
        return any(block_id in group for group in groups)

    @property
    def num_all_expected(self) -> int:
        return len(self._holds)

    def num_expected(self, tenant: str, now_s: float, *, persons: bool) -> int:
        """Blocks of a tenant's persons, or agents, that are expected back."""
        self._end_holds(now_s)
        return self._num_expected[tenant, persons]

    def add(self, block_id: int, tag: Tag | None = None, hold: Hold | None = None) -> None:
        """Add a block that was just released."""
        if hold is not None and not hold.is_over:
            self._add_held(block_id, tag, hold)
            return
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
        elif block_id in self._holds:
            self._remove_held(block_id)
        else:
            del self._expired[block_id]

    def pop(self, now_s: float) -> int:
        """Remove and return the next victim; KeyError if there is none."""
        self._expire(now_s)
        self._end_holds(now_s)
        for group in (self._expired, self._plain):
            if group:
                return group.popitem(last=False)[0]
        lowest = min(self._wanted, default=None)
        if self._held and (lowest is None or lowest > 0):
            first = self._first_hold(self._ends[0]) or self._first_hold(self._ends[1])
            assert first is not None, "blocks of no hold"
            block_id = next(iter(self._held[first]))
            self._remove_held(block_id)
            return block_id
        if lowest is None:
            raise KeyError("no block to evict")
        block_id = next(iter(self._wanted[lowest]))
        self._remove_wanted(block_id)
        return block_id

    def _add_held(self, block_id: int, tag: Tag | None, hold: Hold) -> None:
        group = self._held.get(hold)
        if group is None:
            group = self._held[hold] = OrderedDict()
            ends = self._ends[hold.is_persons]
            heapq.heappush(ends, (hold.expires_s, next(self._numbers), hold))
            if len(ends) > 2 * len(self._held) + 64:  # mostly stale entries
                ends[:] = {id(end[2]): end for end in ends if end[2] in self._held}.values()
                heapq.heapify(ends)
        group[block_id] = tag
        self._holds[block_id] = hold
        self._num_expected[hold.tenant, hold.is_persons] += 1

    def _remove_held(self, block_id: int) -> Tag | None:
        hold = self._holds.pop(block_id)
        group = self._held[hold]
        tag = group.pop(block_id)
        if not group:
            del self._held[hold]
        key = hold.tenant, hold.is_persons
        self._num_expected[key] -= 1
        if not self._num_expected[key]:
            del self._num_expected[key]
        return tag

    def _end_holds(self, now_s: float) -> None:
        """Let the blocks of sessions that did not come back be as used just now: least recent use
        decides again."""
        for ends in self._ends:
            while ends and ends[0][0] <= now_s:
                hold = self._first_hold(ends)
                if hold is None or hold.expires_s > now_s:
                    break
                self.end_hold(hold)

    def _first_hold(self, ends: list[_End]) -> Hold | None:
        """The hold that ends first, of those that have blocks here."""
        while ends:
            end_s, _, hold = ends[0]
            if hold not in self._held:
                heapq.heappop(ends)
            elif hold.expires_s > end_s:  # it was extended
                heapq.heapreplace(ends, (hold.expires_s, next(self._numbers), hold))
            else:
                return hold
        return None

    def end_hold(self, hold: Hold) -> None:
        hold.is_over = True
        for block_id in list(self._held.get(hold, ())):
            self.add(block_id, self._remove_held(block_id))

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
