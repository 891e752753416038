"""What outputs tell of the engine's time and blocks that their requests took."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from penstock.engine.batch import Batch, BatchResult
from penstock.engine.config import SchedulerConfig
from penstock.engine.engine_core import Handle
from penstock.engine.request import BeamSearch

from .stack import Stack, prompts

STEP_S = 0.004  # of compute, and of the clock
FEW_BLOCKS = {"num_blocks": 24, "num_host_blocks": 12, "enable_prefix_caching": True}


class _Timed:
    """A device whose every step takes `STEP_S`."""

    def __init__(self, stack: Stack) -> None:
        self._stack, self._submit = stack, stack.device.submit
        self.compute_s = 0.0

    def __call__(self, batch: Batch) -> Handle:
        handle = self._submit(batch)
        return _Handle(self, handle, batch)

    def ended(self, result: BatchResult) -> BatchResult:
        self._stack.clock.now_s += STEP_S
        self.compute_s += STEP_S
        return msgspec.structs.replace(result, compute_s=STEP_S)


class _Handle:
    def __init__(self, device: _Timed, handle: Handle, batch: Batch) -> None:
        self._device, self._handle, self._batch = device, handle, batch

    def result(self) -> BatchResult:
        result = self._handle.result()
        return self._device.ended(result) if self._batch.scheduled else result


def timed(stack: Stack) -> _Timed:
    device = _Timed(stack)
    stack.device.submit = device  # type: ignore[method-assign]
    return device


def told(stack: Stack, *request_ids: str) -> tuple[int, int]:
    """Microseconds of compute, and of blocks."""
    spent = [
        output.spent
        for (request_id, _), outputs in stack.outputs.items()
        if not request_ids or request_id in request_ids
        for output in outputs
        if output.spent is not None
    ]
    return sum(each.compute_us for each in spent), sum(each.block_us for each in spent)


@pytest.mark.parametrize(
    "settings",
    [{}, FEW_BLOCKS, {**FEW_BLOCKS, "num_host_blocks": 0}],
    ids=["alone", "swapped", "recomputed"],
)
def test_all_that_was_computed_is_told_once(settings: dict[str, Any]) -> None:
    stack = Stack(**settings, config=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=16))
    device = timed(stack)
    for number, prompt in enumerate(prompts(12, longest=30)):
        more: dict[str, Any] = {"n": 3} if number == 3 else {}
        stack.add(f"r{number}", prompt, max_tokens=20, ignore_eos=True, **more)
    search = BeamSearch(width=3)
    stack.add("beams", list(range(9)), max_tokens=8, n=2, beam_search=search)
    stack.run()
    counters = stack.scheduler.counters
    assert bool(settings) == bool(counters.num_preemptions)
    compute_us, block_us = told(stack)
    assert (compute_us, block_us) == (counters.spent_compute_us, counters.spent_block_us)
    # A part of a microsecond stays with each sequence.
    assert compute_us == pytest.approx(1e6 * device.compute_s, abs=40)


def test_a_step_is_shared_by_its_tokens_and_blocks_count_while_they_are_held() -> None:
    stack = Stack(config=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64))
    timed(stack)
    stack.add("long", [1] * 9, max_tokens=2, ignore_eos=True)
    stack.add("short", [2] * 3, max_tokens=2, ignore_eos=True)
    stack.run()
    # In the first step 9 and 3 tokens, in 3 blocks and 1; in the second one each, in as many.
    assert told(stack, "long") == (3000 + 2000, 3 * 8000)
    assert told(stack, "short") == (1000 + 2000, 1 * 8000)


def test_a_long_output_tells_from_time_to_time() -> None:
    stack = Stack(num_blocks=64)
    timed(stack)
    stack.add("a", [1, 2, 3], max_tokens=40, ignore_eos=True)
    stack.run()
    places = [at for at, each in enumerate(stack.outputs["a", 0]) if each.spent is not None]
    assert places == [12, 25, 38, 39]  # every 50 ms
    assert told(stack) == (40 * 4000, stack.scheduler.counters.spent_block_us)


def test_what_was_in_host_memory_is_told_with_the_hits() -> None:
    stack = Stack(num_blocks=16, num_host_blocks=32, enable_prefix_caching=True, max_model_len=40)
    first = list(range(20))

    def hits(name: str, prompt: Sequence[int]) -> tuple[int, int]:
        stack.add(name, list(prompt), max_tokens=2, ignore_eos=True)
        stack.run()
        outputs = stack.outputs[name, 0]
        return (
            sum(each.num_cached_tokens for each in outputs),
            sum(each.num_host_cached_tokens for each in outputs),
        )

    assert hits("a", first) == (0, 0)
    assert hits("b", [*first, 7]) == (20, 0)
    for number in range(4):  # which take all blocks of the device
        hits(f"other {number}", [number + 20] * 30)
    assert hits("c", [*first, 7]) == (20, 20)
