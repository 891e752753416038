"""Block accounting on its own."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.blocks import BlockManager
from penstock.engine.blocks.block_pool import BlockPool
from penstock.engine.blocks.block_table import BlockTable


def test_a_table_asks_for_blocks_as_positions_come() -> None:
    table = BlockTable(16)
    assert [table.num_missing_blocks(n) for n in (0, 1, 16, 17, 32, 33)] == [0, 1, 1, 2, 2, 3]
    table.block_ids = [7, 3]
    assert table.capacity_tokens == 32
    assert table.num_missing_blocks(32) == 0
    assert table.num_missing_blocks(33) == 1


def test_growth_is_all_or_nothing() -> None:
    blocks = BlockManager(num_blocks=4, block_size=2)
    assert blocks.grow(1, 5) == (0, 1, 2)
    assert blocks.grow(2, 4) is None
    assert blocks.num_free_blocks == 1
    assert blocks.block_ids(2) == ()
    assert blocks.grow(1, 6) == ()
    assert blocks.grow(2, 2) == (3,)
    blocks.release(1)
    blocks.release(1)
    assert blocks.num_free_blocks == 3
    blocks.check_integrity()


def test_the_pool_notices_misuse() -> None:
    pool = BlockPool(3)
    taken = pool.allocate(2)
    pool.release(taken)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.release(taken[:1])
    with pytest.raises(AssertionError, match="more blocks than"):
        pool.allocate(4)
    held = pool.allocate(1)
    with pytest.raises(AssertionError, match="differ from the tables"):
        pool.check_integrity([])
    pool.check_integrity(held)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 60)), max_size=60),
    st.integers(1, 30),
    st.integers(1, 8),
)
def test_no_history_leaks_or_doubles(
    moves: list[tuple[int, int]], num_blocks: int, block_size: int
) -> None:
    blocks = BlockManager(num_blocks=num_blocks, block_size=block_size)
    for seq_id, num_tokens in moves:
        if num_tokens == 0:
            blocks.release(seq_id)
        elif blocks.grow(seq_id, num_tokens) is not None:
            assert len(blocks.block_ids(seq_id)) * block_size >= num_tokens
        blocks.check_integrity()
    held = [block for seq_id in range(6) for block in blocks.block_ids(seq_id)]
    assert len(held) == len(set(held)) == blocks.num_used_blocks
