"""In which order cached blocks that nobody holds give way.

First those whose retention has expired, then those nobody asked to keep, then those still wanted,
lowest priority first; each group by least recent use. Nothing is pinned: the last group goes too.

Knows ids and times, nothing of contents.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tag:
    """How long a block is wanted, by the same clock as `pop`'s `now_s`, and how much."""

    expires_s: float
    priority: int = 0

    def joined(self, other: Tag) -> Tag:
        """What satisfies both."""
        return Tag(max(self.expires_s, other.expires_s), max(self.priority, other.priority))


class EvictionOrder:
    """A set of block ids with a next victim.

    `OrderedDict` is a hash table over a doubly linked list, so adding, removing from the middle
    and taking the oldest are O(1); blocks that carry a tag cost O(log n) on top.
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
        """The block was used just now and is held by nobody any more."""
        if tag is None:
            self._plain[block_id] = None
            return
        self._tags[block_id] = tag
        self._wanted.setdefault(tag.priority, OrderedDict())[block_id] = None
        heapq.heappush(self._deadlines, (tag.expires_s, block_id))
        if len(self._deadlines) > 2 * len(self._tags) + 64:  # mostly of blocks used again since
            self._deadlines = [(known.expires_s, each) for each, known in self._tags.items()]
            heapq.heapify(self._deadlines)

    def remove(self, block_id: int) -> None:
        """Somebody holds it again. KeyError if it is not here."""
        if block_id in self._plain:
            del self._plain[block_id]
        elif block_id in self._tags:
            self._remove_wanted(block_id)
        else:
            del self._expired[block_id]

    def pop(self, now_s: float) -> int:
        """The block to give up. KeyError if there is none."""
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
