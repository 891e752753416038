"""Steps that go on from the last one give what steps prepared from scratch give."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.engine.runner.input_batch import DecodeRun
from tests.engine.runner.test_model_runner import prompt

WAYS: dict[int, dict[str, Any]] = {
    0: {"temperature": 0.0},
    1: {"temperature": 1.0, "seed": 3},
    2: {"temperature": 0.7, "seed": 5, "top_p": 0.9, "logprobs": 2},
    3: {"temperature": 1.0, "seed": 7, "top_k": 20},
}


@pytest.fixture
def num_advances(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many sequences each step had that went on from the last one."""
    seen: list[int] = []
    advance = DecodeRun.advance

    def counted(run: DecodeRun) -> Any:
        seen.append(len(run.seq_ids))
        return advance(run)

    monkeypatch.setattr(DecodeRun, "advance", counted)
    return seen


def test_sequences_that_join_and_leave_take_the_tokens_they_take_alone(
    tiny_checkpoint, driver, num_advances
):
    path = tiny_checkpoint()
    crowd = driver(path)
    for seq_id, params in WAYS.items():
        crowd.add(seq_id, prompt(5 + seq_id, seq_id), **params)
    crowd.step({0: -1, 1: -1, 2: -1})
    for _ in range(6):
        crowd.step({0: 1, 1: 1, 2: 1})
    crowd.step({0: 1, 1: 1, 2: 1, 3: 3})  # a part of a prompt
    crowd.step({0: 1, 1: 1, 2: 1, 3: -1})
    for order in ((0, 1, 2, 3), (3, 0, 2, 1), (2, 0), (0, 1, 2, 3)):
        for _ in range(5):
            crowd.step(dict.fromkeys(order, 1))
    crowd.leave(1)
    for _ in range(9):
        crowd.step({0: 1, 2: 1, 3: 1})
    assert num_advances == [3] * 5 + [4] * 8 + [2] * 4 + [4] * 4 + [3] * 8
    for seq_id, params in WAYS.items():
        alone = driver(path)
        alone.add(seq_id, prompt(5 + seq_id, seq_id), **params)
        alone.step({seq_id: -1})
        while len(alone.output(seq_id)) < len(crowd.output(seq_id)):
            alone.preempt(seq_id)  # enters anew in every step: nothing goes on
            alone.step({seq_id: -1})
        assert crowd.output(seq_id) == alone.output(seq_id)


def test_a_run_outgrows_what_it_was_prepared_for(tiny_checkpoint, driver, num_advances):
    path = tiny_checkpoint(max_position_embeddings=600)
    kept, broken = (driver(path, max_model_len=600, num_blocks=150) for _ in range(2))
    for drive in (kept, broken):
        drive.add(1, prompt(10), temperature=1.0, seed=2, max_tokens=500)
        drive.step({1: -1})
    for _ in range(300):
        kept.step({1: 1})
    assert num_advances == [1] * 299
    while len(broken.output(1)) < len(kept.output(1)):
        broken.step({1: 1})
        if len(broken.output(1)) % 50 == 0:
            broken.preempt(1)
            broken.step({1: -1})
    assert broken.output(1) == kept.output(1)


def test_penalties_are_of_the_tokens_so_far(tiny_checkpoint, driver):
    """One row's logits are changed, its neighbour's are not; and the neighbour goes on alone."""
    path = tiny_checkpoint()
    both, alone = driver(path), driver(path)
    for drive in (both, alone):
        drive.add(1, prompt(9), temperature=1.0, seed=4)
    both.add(2, prompt(7, 2), temperature=0.0, frequency_penalty=2.0)
    both.step({1: -1, 2: -1})
    alone.step({1: -1})
    for _ in range(12):
        both.step({1: 1, 2: 1})
        alone.step({1: 1})
    both.leave(2)
    for _ in range(6):
        both.step({1: 1})
        alone.step({1: 1})
    assert both.output(1) == alone.output(1)
    penalised = driver(path)
    penalised.add(2, prompt(7, 2), temperature=0.0, frequency_penalty=2.0)
    penalised.step({2: -1})
    for _ in range(12):
        penalised.step({2: 1})
    assert both.output(2) == penalised.output(2)
