"""One tier's pool: states of a block, and the order of eviction."""

from __future__ import annotations

import random

import pytest

from penstock.engine.blocks.block_pool import BlockPool, EvictionOrder
from penstock.engine.blocks.prefix_cache import CachedBlock, Tag


def pool(num_blocks: int, evicted: list[int] | None = None) -> BlockPool:
    return BlockPool(
        num_blocks,
        clock=lambda: 0.0,
        on_evict=lambda block_id, _: None if evicted is None else evicted.append(block_id),
    )


def test_the_pool_notices_misuse() -> None:
    blocks = pool(3)
    taken = blocks.allocate(2)
    for block_id in taken:
        blocks.release(block_id)
    with pytest.raises(AssertionError, match="freed twice"):
        blocks.release(taken[0])
    with pytest.raises(AssertionError, match="more blocks than"):
        blocks.allocate(4)
    with pytest.raises(KeyError):
        blocks.incref(0)  # empty: there is nothing to share
    held = blocks.allocate(1)
    with pytest.raises(AssertionError, match="differ from the tables"):
        blocks.check_integrity([])
    blocks.check_integrity(held)


def test_cached_blocks_go_only_when_no_empty_one_is_left() -> None:
    evicted: list[int] = []
    blocks = pool(4, evicted)
    first, second, third = blocks.allocate(3)
    for block_id in (second, first):
        blocks.contents[block_id] = CachedBlock(parent=b"", tokens=b"")
        blocks.release(block_id)
    assert (blocks.num_available, blocks.num_cached, blocks.num_held) == (3, 2, 1)
    assert blocks.allocate(1) == [3]
    assert evicted == []
    blocks.incref(second)  # somebody shares it: the other one is now the oldest
    blocks.release(second)
    assert blocks.allocate(2) == [first, second]
    assert evicted == [first, second]
    blocks.check_integrity([third, 3, first, second])


def test_eviction_order_agrees_with_sorting() -> None:
    rng = random.Random(2)
    order = EvictionOrder()
    known: dict[int, tuple[Tag | None, int]] = {}
    expired_at: dict[int, int] = {}
    now = 0.0
    for tick in range(5000):
        now += 0.1
        for block_id, (tag, _) in known.items():
            if tag is not None and tag.expires_s <= now:
                expired_at.setdefault(block_id, tick)
        action = rng.random()
        if action < 0.5 and len(known) < 60:
            block_id = rng.choice([number for number in range(80) if number not in known])
            tag = Tag(now + rng.random() * 8, rng.randint(0, 2)) if rng.random() < 0.7 else None
            known[block_id] = (tag, tick)
            order.add(block_id, tag)
        elif known:
            if action < 0.7:
                block_id = rng.choice(sorted(known))
                order.remove(block_id)
            else:
                block_id = order.pop(now)
                tag, _ = known[block_id]
                expired = [other for other in known if other in expired_at]
                plain = [other for other, (own, _) in known.items() if own is None]
                if expired:
                    assert block_id in expired
                elif plain:
                    assert block_id == min(plain, key=lambda other: known[other][1])
                else:
                    assert tag is not None
                    least = min(own.priority for own, _ in known.values() if own is not None)
                    equals = [
                        other
                        for other, (own, _) in known.items()
                        if own is not None and own.priority == least
                    ]
                    assert block_id == min(equals, key=lambda other: known[other][1])
            del known[block_id]
            expired_at.pop(block_id, None)
        assert len(order) == len(known)
        assert all(block_id in order for block_id in known)
    with pytest.raises(KeyError):
        EvictionOrder().pop(0.0)
