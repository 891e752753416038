"""Steps that move blocks: the runner through hand-made batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.engine.batch import Batch, BlockMoves, ScheduledSequence, SequenceEntry
from penstock.engine.request import SamplingParams

from .test_model_runner import prompt

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


def test_a_fork_goes_on_from_copied_blocks(tiny_checkpoint, driver):
    """A second sequence enters with the first one's KV already in blocks of its own."""
    drive = driver(tiny_checkpoint())
    drive.add(1, prompt(10))
    drive.step({1: -1})
    parent, num_blocks = drive.tables[1], drive.runner.info.num_blocks
    fork = [block for block in range(num_blocks) if block not in parent][: len(parent)]
    entry = SequenceEntry(
        token_ids=tuple(drive.tokens[1]),
        num_prompt_tokens=10,
        num_computed_tokens=10,
        index=1,
        params=SamplingParams(temperature=0.0),
    )
    share = {"num_new_tokens": 1, "new_block_ids": tuple(fork), "entry": entry}
    batch = Batch(
        step=1,
        scheduled=(
            ScheduledSequence(seq_id=1, num_new_tokens=1),
            ScheduledSequence(seq_id=2, **share),
        ),
        moves=BlockMoves(copies=tuple(zip(parent, fork, strict=True))),
    )
    result = drive.runner.execute(batch)
    assert result.token_ids[1] == result.token_ids[2]


@pytest.mark.parametrize("device", DEVICES)
def test_a_swapped_sequence_goes_on_as_if_nothing_had_happened(device, tiny_checkpoint, driver):
    """Its blocks are overwritten in the step that saves them, and come back elsewhere."""
    path = tiny_checkpoint()
    params = {"temperature": 1.0, "seed": 11}
    straight, swapped = driver(path, device=device), driver(path, num_blocks=32, device=device)
    for drive in (straight, swapped):
        drive.add(1, prompt(30), **params)
        drive.step({1: -1})
    for _ in range(25):
        straight.step({1: 1})
    for round_trip in range(3):
        swapped.step({1: 1})
        swapped.park(1)
        swapped.add(2, prompt(90, round_trip), temperature=1.0)
        swapped.step({2: -1})
        swapped.step({2: 1})
        swapped.leave(2)
        swapped.resume(1)
        swapped.step({1: 1})
    while len(swapped.output(1)) < 26:
        swapped.step({1: 1})
    assert swapped.output(1) == straight.output(1)


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_may_only_move_blocks(device, tiny_checkpoint, driver):
    drive = driver(tiny_checkpoint(), device=device)
    drive.add(1, prompt(9))
    token = drive.step({1: -1}).token_ids[1]
    table = drive.tables[1]
    moves = BlockMoves(swap_outs=tuple(zip(table, (5, 3, 4), strict=True)))
    result = drive.runner.execute(Batch(step=0, scheduled=(), moves=moves))
    assert (result.token_ids, result.swap_in_s) == ({}, 0.0)
    drive.runner._kv_pool.zero_()
    back = BlockMoves(swap_ins=((5, table[0]), (3, table[1]), (4, table[2])))
    result = drive.runner.execute(Batch(step=1, scheduled=(), moves=back))
    assert result.swap_in_s > 0
    entry = SequenceEntry(
        token_ids=tuple(prompt(9)),
        num_prompt_tokens=9,
        num_computed_tokens=8,
        index=0,
        params=SamplingParams(temperature=0.0),
    )
    share = ScheduledSequence(seq_id=7, num_new_tokens=1, new_block_ids=tuple(table), entry=entry)
    assert drive.runner.execute(Batch(step=2, scheduled=(share,))).token_ids[7] == token


def test_seconds_of_a_step_and_of_its_swaps(tiny_checkpoint, driver):
    drive = driver(tiny_checkpoint())
    drive.add(1, prompt(30))
    plain = drive.step({1: -1})
    assert plain.compute_s > 0
    assert (plain.swap_out_s, plain.swap_in_s) == (0.0, 0.0)
    drive.park(1)
    drive.add(2, prompt(4))
    out = drive.step({2: -1})
    assert out.compute_s > 0
    assert out.swap_out_s > 0
    assert out.swap_in_s == 0.0
    drive.resume(1)
    back = drive.step({1: 1, 2: 1})
    assert back.swap_out_s == 0.0
    assert back.swap_in_s > 0
