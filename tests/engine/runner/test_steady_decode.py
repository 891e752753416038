"""Steps that go on from the last one give what steps prepared from scratch give."""

from __future__ import annotations

import random
from typing import Any

import pytest

from penstock.engine.config import CacheConfig, EngineConfig, SchedulerConfig
from penstock.engine.models.language_model import DrawnTokens
from penstock.engine.request import FinishReason, Request, SamplingParams
from penstock.engine.runner.input_batch import SteadyDecode, SteadyVerify
from penstock.engine.startup import build_core
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
    for kind in (SteadyDecode, SteadyVerify):

        def counted(run: SteadyDecode, *args: Any, advance: Any = kind.advance) -> Any:
            seen.append(len(run.seq_ids))
            return advance(run, *args)

        monkeypatch.setattr(kind, "advance", counted)
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
    for seq_id in WAYS:
        output = crowd.output(seq_id)
        assert output == anew(driver(path), seq_id, len(output))


def anew(alone: Any, seq_id: int, num_tokens: int) -> list[int]:
    """A sequence's output where it enters anew in every step, so that nothing goes on."""
    alone.add(seq_id, prompt(5 + seq_id, seq_id), **WAYS[seq_id])
    alone.step({seq_id: -1})
    while len(alone.output(seq_id)) < num_tokens:
        alone.preempt(seq_id)
        alone.step({seq_id: -1})
    return alone.output(seq_id)


def test_drafts_like_the_last_ones_change_no_token(tiny_checkpoint, driver, num_advances):
    """Right and wrong ones, of several sequences beside one that has none."""
    path = tiny_checkpoint()
    expected = {seq_id: anew(driver(path), seq_id, 90) for seq_id in WAYS}
    crowd, rng = driver(path), random.Random(1)
    for seq_id, params in WAYS.items():
        crowd.add(seq_id, prompt(5 + seq_id, seq_id), **params)
    crowd.step(dict.fromkeys(WAYS, -1))
    num_right = num_wrong = 0
    for nums in ({0: 3, 1: 0, 2: 2, 3: 7}, {0: 3, 1: 1, 2: 2, 3: 7}, {0: 1, 1: 2, 2: 3, 3: 4}):
        for _ in range(5):
            known = {seq_id: len(crowd.output(seq_id)) for seq_id in WAYS}
            drafts = {
                seq_id: tuple(
                    token_id if rng.random() < 0.8 else 5
                    for token_id in expected[seq_id][known[seq_id] :][:num]
                )
                for seq_id, num in nums.items()
            }
            result = crowd.step(dict.fromkeys(WAYS, 1), drafts=drafts)
            for seq_id, token_ids in result.token_ids.items():
                num_right += len(token_ids) - 1
                num_wrong += len(drafts[seq_id]) + 1 - len(token_ids)
    assert num_advances == [4] * 4 * 3
    assert num_right > 40
    assert num_wrong > 40
    crowd.step(dict.fromkeys(WAYS, 1))
    for seq_id in WAYS:
        output = crowd.output(seq_id)
        assert output == expected[seq_id][: len(output)]


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_a_run_outgrows_what_it_was_prepared_for(tiny_checkpoint, driver, num_advances, num_drafts):
    path = tiny_checkpoint(max_position_embeddings=600)
    kept, broken = (driver(path, max_model_len=600, num_blocks=150) for _ in range(2))
    for drive in (kept, broken):
        drive.add(1, prompt(10), temperature=1.0, seed=2, max_tokens=500)
        drive.step({1: -1})
    while len(broken.output(1)) < 301:
        broken.step({1: 1})
        if len(broken.output(1)) % 50 == 0:
            broken.preempt(1)
            broken.step({1: -1})
    num_advances.clear()
    num_steps = 300 // (1 + num_drafts)
    for _ in range(num_steps):
        known = len(kept.output(1))
        kept.step({1: 1}, drafts={1: tuple(broken.output(1)[known : known + num_drafts])})
    assert num_advances == [1] * (num_steps - 1)
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


def test_a_step_again_gives_what_a_prepared_one_gives(monkeypatch):
    """Of sequences that end one after another, the last of them for an error of its own."""
    read = DrawnTokens.read
    results = []
    for can_repeat in (False, True):
        one_by_one = SchedulerConfig(speculative_config={"method": "none"})
        cache = CacheConfig(num_blocks=200)
        core, _ = build_core(EngineConfig(cache=cache, scheduler=one_by_one))
        runner = core._executor._runner
        runner._can_repeat &= can_repeat
        repeats: list[int] = []  # how many sequences each such step had
        repeat = runner._repeat
        monkeypatch.setattr(
            runner,
            "_repeat",
            lambda batch, run, repeat=repeat, repeats=repeats: (
                repeats.append(len(batch.scheduled)) or repeat(batch, run)
            ),
        )
        for seq_id, length in {0: 20, 1: 30, 2: 5, 3: 50}.items():  # 2 has log-probabilities
            params = SamplingParams(max_tokens=length, ignore_eos=True, **WAYS[seq_id])
            request = Request(
                request_id=f"{seq_id}", prompt_token_ids=prompt(9, seq_id), sampling_params=params
            )
            core.add(request)
        found: dict[str, list[int]] = {each: [] for each in "0123"}
        while core.has_work():
            if len(found["3"]) == 45:
                monkeypatch.setattr(DrawnTokens, "read", lambda self: (read(self)[0], [False]))
            for output in core.step():
                found[output.request_id] += output.token_ids
                assert (output.finish_reason is FinishReason.ERROR) is (not output.token_ids)
        monkeypatch.setattr(DrawnTokens, "read", read)
        results.append(found)
        assert (set(repeats) == {1, 2, 3} and len(repeats) > 20) is can_repeat
    assert results[0] == results[1]
    assert [len(found[each]) for each in "0123"] == [20, 30, 5, 45]
