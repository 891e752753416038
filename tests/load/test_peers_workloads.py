"""What rivals are asked: shapes, and sameness."""

from __future__ import annotations

import statistics

import pytest

from penstock.load.peers import models, workloads


def test_single_streams_are_128_in_and_128_out() -> None:
    workload = workloads.make("single", "S")
    assert {(len(turn.text), turn.max_tokens) for turn in workload.turns} == {(128, 128)}
    assert workload.concurrency == 1


@pytest.mark.parametrize(("name", "concurrency"), [("c8", 8), ("c32", 32)])
def test_lengths_are_lognormal_within_their_bounds(name: str, concurrency: int) -> None:
    workload = workloads.make(name, "S")
    assert workload.concurrency == concurrency < len(workload.dialogues)
    prompts = [len(turn.text) for turn in workload.turns]
    outputs = [turn.max_tokens for turn in workload.turns]
    assert set(prompts) <= set(range(16, 513))
    assert set(outputs) <= set(range(16, 257))
    assert 110 < statistics.mean(prompts) < 210
    assert 100 < statistics.mean(outputs) < 160


@pytest.mark.parametrize("model", workloads.PLANS)
@pytest.mark.parametrize("name", workloads.WORKLOADS)
def test_every_call_makes_the_same(name: str, model: str) -> None:
    assert workloads.make(name, model) == workloads.make(name, model)


def test_token_ids_are_words_of_the_model() -> None:
    for dialogue in workloads.make("front128", "T").dialogues:
        assert set(dialogue.turns[0].text) <= set(models.word_ids("T"))
