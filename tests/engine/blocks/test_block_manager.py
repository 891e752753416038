"""Block accounting on its own: tables, planned moves, keys and tails."""

from __future__ import annotations

from penstock.engine.batch import BlockMoves
from penstock.engine.blocks import BlockManager
from penstock.engine.blocks.block_keys import block_key, pack, root_key
from penstock.engine.blocks.prefix_cache import CachedBlock, PrefixCache
from penstock.engine.blocks.prefixes import BlockTable
from penstock.engine.blocks.tiers import MovePlan
from penstock.engine.request import Sequence
from tests.engine.scheduling.stack import make_request

from .test_block_pool import pool


def sequence(seq_id: int, num_tokens: int) -> Sequence:
    return Sequence(make_request(f"r{seq_id}", list(range(num_tokens))), seq_id=seq_id)


def test_a_table_asks_for_blocks_as_positions_come() -> None:
    table = BlockTable(16)
    assert [table.num_missing_blocks(n) for n in (0, 1, 16, 17, 32, 33)] == [0, 1, 1, 2, 2, 3]
    table.block_ids = [7, 3]
    assert table.capacity_tokens == 32
    assert table.num_missing_blocks(32) == 0
    assert table.num_missing_blocks(33) == 1


def test_room_is_all_or_nothing() -> None:
    blocks = BlockManager(num_blocks=4, block_size=2, enable_prefix_caching=False)
    first, second = sequence(1, 5), sequence(2, 4)
    assert blocks.admit(first) == 0
    assert blocks.block_ids(first) == (0, 1, 2)
    assert blocks.admit(second) is None
    assert (blocks.tiers.device.num_held, blocks.block_ids(second)) == (3, ())
    assert blocks.grow(first, 6) == ()
    assert blocks.grow(first, 8) == (3,)
    assert blocks.grow(first, 9) is None
    blocks.release(first)
    blocks.release(first)
    assert blocks.admit(second, num_spared=3) is None
    assert blocks.admit(second, num_spared=2) == 0
    blocks.check_integrity()


def test_a_plan_reads_before_it_writes() -> None:
    device, host = pool(6), pool(3)
    plan = MovePlan(device, host)
    source, target, later = device.allocate(3)
    (saved,) = host.allocate(1)
    plan.copy(source, target)
    device.release(source)
    assert device.ref_counts[source] == 1, "held until the copy is handed over"
    assert (plan.num_holders(source), plan.is_pending(target)) == (0, True)
    # What is yet to be copied is saved from where it still is.
    plan.swap_out(target, saved)
    plan.cancel(target)
    plan.swap_in(saved, later)
    host.release(saved)
    assert plan.take_moves() == BlockMoves(
        swap_outs=((source, saved),), swap_ins=((saved, later),), copies=()
    )
    assert device.ref_counts[source] == host.ref_counts[saved] == 0
    assert not plan.take_moves()


def test_keys_stand_for_everything_before_them() -> None:
    tokens = pack([1, 2, 3])
    assert block_key(root_key(b"a", b"bc"), tokens) != block_key(root_key(b"ab", b"c"), tokens)
    # Stable across processes and machines: SHA-256 over the parent and little-endian words.
    # (sha256 of 32 zero bytes, 01 00 00 00, 02 00 00 00, by another program.)
    known = "e7ca17d6581d126af7e0c8574cdd8987ed93319969b54a5e2a272d585a38f3ea"
    assert block_key(bytes(32), pack([1, 2])).hex() == known
    assert pack([1, 258]) == b"\x01\0\0\0\x02\x01\0\0"


def test_the_longest_tail_is_found_among_siblings() -> None:
    cache = PrefixCache()
    children = [CachedBlock(parent=b"p", tokens=pack(tokens)) for tokens in
                ([1, 2], [1, 2, 3, 4], [1, 9, 9], [256, 2])]  # fmt: skip
    for child in children:
        cache.insert(child)

    def tail(tokens: list[int], *, but: CachedBlock | None = None) -> tuple[int, int] | None:
        found = cache.longest_tail(b"p", pack(tokens), is_usable=lambda block: block is not but)
        return None if found is None else (children.index(found[0]), found[1])

    assert tail([1, 2, 3, 9]) == (1, 3)
    assert tail([1, 2, 3, 9], but=children[1]) == (0, 2)
    assert tail([0, 2]) is None  # shares bytes of the first word, but no token
    assert tail([1, 9]) == (2, 2)
    for child in children:
        cache.remove(child)
    assert tail([1]) is None
    assert not cache.has_children(b"p")
