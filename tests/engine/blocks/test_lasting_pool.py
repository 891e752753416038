"""Blocks that outlive their engine: whenever it ends, what the next one finds is right."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.engine.blocks.block_keys import block_key, pack
from penstock.engine.blocks.lasting_pool import BlockRecords, LastingPool
from penstock.engine.blocks.prefix_cache import CachedBlock
from penstock.engine.config import SchedulerConfig
from penstock.engine.request import FinishReason, RequestOutput
from tests.engine.scheduling.fake_device import VOCAB_SIZE, expected_output
from tests.engine.scheduling.stack import Stack

_NUM_BLOCKS, _BLOCK_SIZE = 45, 4
_ROOT = bytes(range(32))
_NUM_REQUESTS, _NUM_TOKENS = 12, 40

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="where there are no templates, nothing outlives"
)


@pytest.fixture
def fd() -> Iterator[int]:
    number = os.memfd_create("test")
    yield number
    os.close(number)


def records_of(fd: int, *, layout: str = "float32", root: bytes = _ROOT) -> BlockRecords:
    """What the next engine finds."""
    pool = LastingPool(fd)
    memory = pool.map(layout, num_blocks=_NUM_BLOCKS, block_size=_BLOCK_SIZE, block_bytes=100)
    assert memory is not None
    assert len(memory) == 100 * _NUM_BLOCKS
    records = pool.records(root)
    assert records is not None
    return records


def recorded(records: BlockRecords) -> dict[int, list[int]]:
    """The tokens of each block that a killed engine would leave now."""
    blocks = BlockRecords(records._words, records._records, records._record_bytes).left()
    return {
        block.device_id: list(memoryview(block.tokens).cast("I"))
        for block in blocks
        if block.device_id is not None
    }


class GuardedBlocks(list[Any]):
    """A device's blocks, or the slots of one: none is stored to while recorded."""

    def __init__(self, values: list[Any], records: BlockRecords, device_id: int = -1) -> None:
        self._records, self._device_id = records, device_id
        if device_id < 0:
            values = [GuardedBlocks(value, records, number) for number, value in enumerate(values)]
        super().__init__(values)

    def __setitem__(self, place: Any, value: Any) -> None:
        device_id = place if self._device_id < 0 else self._device_id
        assert not self._records._words[device_id], "a block is written that counts as whole"
        if self._device_id < 0:
            value = GuardedBlocks(value, self._records, device_id)
        super().__setitem__(place, value)


def stack_on(records: BlockRecords, *, steps_in_flight: int = 1, **settings: Any) -> Stack:
    """An engine with a quarter of the blocks that its sequences need."""
    config = SchedulerConfig(
        max_num_seqs=16,
        max_num_batched_tokens=64,
        preemption="swap",
        max_steps_in_flight=steps_in_flight,
    )
    stack = Stack(
        num_blocks=_NUM_BLOCKS,
        block_size=_BLOCK_SIZE,
        num_host_blocks=60,
        enable_prefix_caching=True,
        config=config,
        records=records,
        **settings,
    )
    stack.device.blocks = GuardedBlocks(stack.device.blocks, records)
    return stack


def check_recorded(stack: Stack, records: BlockRecords) -> int:
    found = recorded(records)
    for device_id, tokens in found.items():
        slots = stack.device.blocks[device_id]
        assert [slot and slot[0] for slot in slots] == tokens
    return len(found)


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_an_engine_may_end_at_any_step(fd: int, steps_in_flight: int) -> None:
    """Swaps, copies and evictions beside prefill and decode; each engine but the last is killed."""
    rng = random.Random(7)
    prompts = [
        [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(5, 14))] for _ in range(_NUM_REQUESTS)
    ]
    prompts[1] = [*prompts[0][:-1], 0]  # it begins with a copy
    given: list[list[int]] = [[] for _ in prompts]
    left: list[Any] | None = None
    num_found, num_swaps = 0, 0
    while any(len(tokens) < _NUM_TOKENS for tokens in given):
        records = records_of(fd)
        stack = stack_on(records, steps_in_flight=steps_in_flight)
        if left is not None:
            stack.device.blocks = GuardedBlocks(left, records)
        num_found += stack.blocks.tiers.device.num_cached
        stack.check_blocks()
        for number, prompt in enumerate(prompts):
            if missing := _NUM_TOKENS - len(given[number]):
                known = [*prompt, *given[number]]
                stack.add(f"r{number}", known, max_tokens=missing, arrival=float(number))
        for _ in range(rng.randint(5, 40)):
            if not stack.core.has_work():
                break
            stack.step()
            check_recorded(stack, records)
        for number, tokens in enumerate(given):
            tokens += stack.tokens(f"r{number}")
        num_swaps += stack.scheduler.counters.num_swaps
        left = [list(slots) for slots in stack.device.blocks]
    assert given == [expected_output(prompt, _NUM_TOKENS) for prompt in prompts]
    assert num_found > 30
    assert num_swaps > 5


def test_what_was_computed_last_is_all_that_is_computed_again(fd: int) -> None:
    records = records_of(fd)
    first = stack_on(records)
    prompt = list(range(18))
    first.add("a", prompt, max_tokens=9)
    first.run()
    given = first.tokens("a")
    second = stack_on(records_of(fd))
    second.device.blocks = first.device.blocks
    second.add("a", [*prompt, *given], max_tokens=4)
    second.run()
    assert second.tokens("a") == expected_output([*prompt, *given], 4)
    assert second.num_cached("a") == 24  # of 27: the last tokens' block was not full
    # A salt is in the keys, and keeps what was left from others.
    second.add("b", [*prompt, *given], max_tokens=4, cache_salt="another")
    second.run()
    assert second.num_cached("b") == 0


def test_a_block_is_recorded_once_its_step_has_ended_and_its_result_is_valid(fd: int) -> None:
    records = records_of(fd)
    stack = stack_on(records, steps_in_flight=2)
    stack.add("good", list(range(9)), max_tokens=9)
    stack.add("bad", list(range(20, 29)), max_tokens=9)
    stack.device.failing = {1: FinishReason.ERROR}
    update = stack.scheduler.update

    def update_late(*step: Any) -> list[RequestOutput]:
        assert not any(20 in tokens for tokens in recorded(records).values()), "it may be invalid"
        return update(*step)

    stack.scheduler.update = update_late  # type: ignore[method-assign]
    stack.step()
    assert set(map(tuple, recorded(records).values())) == {(0, 1, 2, 3), (4, 5, 6, 7)}
    stack.run()
    assert check_recorded(stack, records) == 4
    # One that lost its content while the step ran, and has another by now, which waits for its own.
    cache = stack.blocks.tiers.cache
    block = cache.get(next(iter(cache.keys())))
    assert block is not None
    records.publish(40, block)
    taken = records.take()
    records.forget(40)
    records.publish(40, block)
    records.record(taken)
    assert 40 not in recorded(records)
    records.record(records.take())
    assert records._words[40]


@pytest.mark.parametrize(
    "others", [{"layout": "bfloat16"}, {"root": bytes(32)}], ids=["layout", "root"]
)
def test_what_others_left_is_given_up(fd: int, others: dict[str, Any]) -> None:
    records = records_of(fd)
    stack = stack_on(records)
    stack.add("a", list(range(18)), max_tokens=9)
    stack.run()
    assert recorded(records_of(fd))
    assert not recorded(records_of(fd, **others))
    assert not recorded(records_of(fd)), "for good"


def test_what_does_not_hold_together_is_not_taken(fd: int) -> None:
    records = records_of(fd)
    stack = stack_on(records)
    stack.add("a", list(range(18)), max_tokens=9)
    stack.run()
    whole = recorded(records)
    damaged = next(iter(whole))
    records._records[damaged * records._record_bytes + 70] ^= 1  # in its tokens
    again = recorded(records_of(fd))
    assert again == {number: whole[number] for number in whole if number != damaged}
    os.ftruncate(fd, os.fstat(fd).st_size - 1)
    assert LastingPool(fd).num_blocks_left("float32") is None
    assert os.fstat(fd).st_blocks == 0, "and takes no memory"
    # An engine that ended while it made the file.
    records_of(fd)
    os.pwrite(fd, bytes(8), 0)
    assert LastingPool(fd).num_blocks_left("float32") is None


def test_chains_are_evicted_from_their_ends_the_latest_last(fd: int) -> None:
    records = records_of(fd)

    def chain(parent: bytes, device_ids: list[int]) -> list[bytes]:
        keys = []
        for device_id in device_ids:
            tokens = pack([device_id] * _BLOCK_SIZE)
            block = CachedBlock(parent, tokens, block_key(parent, tokens), device_id)
            records.publish(device_id, block)
            parent = block.key or b""
            keys.append(parent)
        records.record(records.take())
        return keys

    system = chain(_ROOT, [5, 6])
    chain(bytes(32), [1, 2])
    chain(system[-1], [9])
    left = records_of(fd).left()
    assert [block.device_id for block in left] == [2, 1, 9, 6, 5]


def test_a_pool_that_cannot_be_is_none(fd: int) -> None:
    pool = LastingPool(fd)
    assert pool.map("x", num_blocks=1 << 45, block_size=4, block_bytes=1 << 10) is None
    assert pool.records(_ROOT) is None
    assert os.fstat(fd).st_size == 0
