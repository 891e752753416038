"""The host tier against two lists of blocks that obey the documented order, and byte for byte."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.batch import BlockMoves
from penstock.engine.runner.kv_swap import HostTier, NoHostTier, Staging

from .simulated_streams import SimulatedStreams

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]
DEVICES: list[Any] = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
        ],
    ),
]
NUM_BLOCKS, NUM_HOST = 7, 5
SHAPE = (2, 2, NUM_BLOCKS, 3, 2, 4)  # as a device's pool has it
Blocks = list[Any]  # what each block holds; None: nothing yet


def random_bits(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Every pattern of bits, NaNs of all kinds among them."""
    generator = torch.Generator().manual_seed(seed)
    size = (*shape[:-1], shape[-1] * dtype.itemsize)
    return torch.randint(256, size, dtype=torch.uint8, generator=generator).view(dtype)


def contents(pool: torch.Tensor) -> list[bytes]:
    blocks = pool.cpu().view(torch.uint8).permute(2, 0, 1, 3, 4, 5)
    return [block.contiguous().numpy().tobytes() for block in blocks]


def follow(moves: BlockMoves, device: Blocks, host: Blocks) -> None:
    """The documented meaning of the moves."""
    for pairs, source, destination in (
        (moves.swap_outs, device, host),
        (moves.swap_ins, host, device),
        (moves.copies, device, device),
    ):
        read = [source[block] for block, _ in pairs]
        for (_, block), content in zip(pairs, read, strict=True):
            destination[block] = content


@st.composite
def pairs(draw: st.DrawFn, num_sources: int, num_destinations: int) -> tuple[Any, ...]:
    destinations = draw(st.lists(st.integers(0, num_destinations - 1), unique=True))
    return tuple((draw(st.integers(0, num_sources - 1)), block) for block in destinations)


MOVES = st.builds(
    BlockMoves,
    swap_outs=pairs(NUM_BLOCKS, NUM_HOST),
    swap_ins=pairs(NUM_HOST, NUM_BLOCKS),
    copies=pairs(NUM_BLOCKS, NUM_BLOCKS),
)
FILL = BlockMoves(swap_outs=tuple((block, block) for block in range(NUM_HOST)))


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=80, deadline=None)
@given(
    plan=st.lists(MOVES, max_size=6),
    dtype=st.sampled_from(DTYPES),
    num_slots=st.integers(1, 3),
    blocks_per_slot=st.integers(0, 4),  # 0: a slot too small for a block holds one all the same
)
def test_any_plan_moves_every_byte_where_it_says(device, plan, dtype, num_slots, blocks_per_slot):
    pool = random_bits(SHAPE, dtype).to(device)
    slot_bytes = blocks_per_slot * pool.nbytes // NUM_BLOCKS
    tier = HostTier(pool, NUM_HOST, staging=Staging(num_slots=num_slots, slot_bytes=slot_bytes))
    expected, host = contents(pool), [b""] * NUM_HOST
    for moves in (FILL, *plan):
        tier.execute(moves)
        follow(moves, expected, host)
        assert contents(pool) == expected


@settings(max_examples=120, deadline=None)
@given(
    plan=st.lists(MOVES, min_size=1, max_size=5),
    num_slots=st.integers(1, 3),
    blocks_per_slot=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)
def test_no_order_of_the_streams_changes_a_byte(plan, num_slots, blocks_per_slot, seed):
    """Each step's compute overwrites the blocks that were given up."""
    pool = random_bits(SHAPE, torch.float32)
    written = random_bits((2, 2, len(plan), 3, 2, 4), torch.float32, seed=1)
    expected, steps, host = contents(pool), contents(written), [b""] * NUM_HOST
    staging = Staging(num_slots=num_slots, slot_bytes=blocks_per_slot * pool.nbytes // NUM_BLOCKS)
    streams = SimulatedStreams(seed)
    with pytest.MonkeyPatch.context() as monkeypatch, streams:
        streams.install(monkeypatch)
        tier = HostTier(pool, NUM_HOST, staging=staging)
        for step, moves in enumerate((FILL, *plan)):
            tier.execute(moves)
            follow(moves, expected, host)
            arrived = {block for _, block in (*moves.swap_ins, *moves.copies)}
            for block in {block for block, _ in moves.swap_outs} - arrived:
                pool[:, :, block] = written[:, :, step - 1]
                expected[block] = steps[step - 1]
        tier.execute(BlockMoves(swap_ins=tuple((block, block) for block in range(NUM_HOST))))
        streams.synchronize()
    assert contents(pool) == host + expected[NUM_HOST:]


@settings(max_examples=80, deadline=None)
@given(
    plan=st.lists(st.tuples(MOVES, st.integers(0, NUM_HOST - 1)), min_size=1, max_size=5),
    seed=st.integers(0, 2**32),
)
def test_blocks_of_other_engines_are_read_and_written_between_steps(plan, seed):
    """Whatever of the steps has not run yet."""
    pool = random_bits(SHAPE, torch.float32)
    written = random_bits((2, 2, len(plan), 3, 2, 4), torch.float32, seed=1)
    expected, steps, host = contents(pool), contents(written), [b""] * NUM_HOST
    streams = SimulatedStreams(seed)
    with pytest.MonkeyPatch.context() as monkeypatch, streams:
        streams.install(monkeypatch)
        tier = HostTier(pool, NUM_HOST, staging=Staging(num_slots=2, slot_bytes=1))
        tier.execute(FILL)
        follow(FILL, expected, host)
        for step, (moves, block) in enumerate(plan):
            tier.execute(moves)
            follow(moves, expected, host)
            pool[:, :, 0] = written[:, :, step]
            expected[0] = steps[step]
            found = tier.read([0, block], [block])
            assert found == [expected[0], expected[block], host[block]]
            tier.execute(moves)
            follow(moves, expected, host)
            host[block] = steps[step][::-1]
            tier.write(block, host[block])
        tier.execute(BlockMoves(swap_ins=tuple((block, block) for block in range(NUM_HOST))))
        streams.synchronize()
    assert contents(pool) == host + expected[NUM_HOST:]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_round_trip_beside_a_busy_device(device, dtype):
    """Steps overwrite blocks as soon as they are given up, and nothing waits in between."""
    num_blocks, num_host, num_steps = 24, 32, 40
    pool = torch.zeros((4, 2, num_blocks, 16, 4, 64), dtype=dtype, device=device)
    written = random_bits((*pool.shape[:2], num_steps, *pool.shape[3:]), dtype).to(device)
    tier = HostTier(pool, num_host, staging=Staging(num_slots=2, slot_bytes=1 << 18))
    weight = torch.randn(2048 if device == "cuda" else 32, 2048 if device == "cuda" else 32)
    weight = weight.to(device)
    rng = random.Random(3)
    expected: Blocks = [None] * num_blocks  # which step wrote it
    host: Blocks = [None] * num_host
    for step in range(num_steps):
        given_up = rng.sample(range(num_blocks), 9)
        known = [block for block in range(num_host) if host[block] is not None]
        wanted = rng.sample(known, min(4, len(known)))
        moves = BlockMoves(
            swap_outs=tuple(zip(given_up, rng.sample(range(num_host), 9), strict=True)),
            swap_ins=tuple(zip(wanted, given_up, strict=False)),
        )
        tier.execute(moves)
        follow(moves, expected, host)
        for block in given_up[4:]:
            pool[:, :, block] = written[:, :, step]
            expected[block] = step
        weight = torch.tanh(weight @ weight)
    zero = bytes(pool[:, :, 0].nbytes)
    steps = contents(written)
    assert contents(pool) == [zero if step is None else steps[step] for step in expected]
    for first in range(0, num_host, num_blocks):
        part = range(first, min(first + num_blocks, num_host))
        tier.execute(BlockMoves(swap_ins=tuple((block, block - first) for block in part)))
        for found, step in zip(contents(pool), host[first:], strict=False):
            assert found == (zero if step is None else steps[step])


@pytest.mark.parametrize("device", DEVICES)
def test_seconds_are_reported_once_and_by_direction(device):
    pool = torch.zeros(SHAPE, device=device)
    tier = HostTier(pool, NUM_HOST)
    assert tier.block_move_s > 0
    assert tier.take_seconds() == (0.0, 0.0)
    for moves in (FILL, BlockMoves(swap_ins=((0, 1),))):
        tier.execute(moves)
        if device == "cuda":
            torch.cuda.synchronize()
        swap_out_s, swap_in_s = tier.take_seconds()
        assert (swap_out_s > 0) == bool(moves.swap_outs)
        assert (swap_in_s > 0) == bool(moves.swap_ins)
        assert tier.take_seconds() == (0.0, 0.0)


@pytest.mark.parametrize(
    "moves",
    [
        {"swap_outs": ((0, NUM_HOST),)},
        {"swap_outs": ((NUM_BLOCKS, 0),)},
        {"swap_outs": ((0, 1), (2, 1))},
        {"swap_ins": ((NUM_HOST, 0),)},
        {"swap_ins": ((0, -1),)},
        {"swap_ins": ((0, 1), (2, 1))},
    ],
)
def test_impossible_swaps_are_our_own_bugs(moves):
    with pytest.raises(AssertionError):
        HostTier(torch.zeros(SHAPE), NUM_HOST).execute(BlockMoves(**moves))


def test_without_host_blocks_only_copies_run():
    pool = random_bits(SHAPE, torch.float32)
    expected = contents(pool)
    tier = NoHostTier(pool)
    moves = BlockMoves(copies=((0, 1), (1, 0)))
    tier.execute(moves)
    follow(moves, expected, [])
    assert contents(pool) == expected
    assert tier.take_seconds() == (0.0, 0.0)
    for impossible in (BlockMoves(swap_outs=((0, 0),)), BlockMoves(swap_ins=((0, 0),))):
        with pytest.raises(AssertionError):
            tier.execute(impossible)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_host_memory_is_pinned_and_given_back():
    pool = torch.zeros(SHAPE, device="cuda")
    for _ in range(3):  # memory still registered could not be registered again
        tier = HostTier(pool, NUM_HOST)
        host = tier._host
        assert host.is_pinned()
        del tier
        assert not host.is_pinned()
