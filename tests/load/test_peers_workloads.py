"""What rivals are asked: shapes, sameness, and one form for servers and libraries."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from penstock.load.peers import models, workloads
from penstock.load.peers.workers.closed_loop import Event, hold


def test_single_streams_are_128_in_and_128_out() -> None:
    workload = workloads.make("single", "S")
    turns = [turn for dialogue in workload.dialogues for turn in dialogue.turns]
    assert {(len(turn.text), turn.max_tokens) for turn in turns} == {(128, 128)}
    assert workload.concurrency == 1
    assert workload.num_output_tokens == 128 * len(turns)


@pytest.mark.parametrize(("name", "concurrency"), [("c8", 8), ("c32", 32)])
def test_lengths_are_lognormal_within_their_bounds(name: str, concurrency: int) -> None:
    workload = workloads.make(name, "S")
    assert workload.concurrency == concurrency < len(workload.dialogues)
    turns = [dialogue.turns[0] for dialogue in workload.dialogues]
    prompts, outputs = [len(turn.text) for turn in turns], [turn.max_tokens for turn in turns]
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


def test_conversations_share_a_system_prompt_of_512_tokens(tmp_path: Path) -> None:
    directory = models.make("T", tmp_path / "T")
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    workload = workloads.make("turns8", "T")
    assert [len(dialogue.turns) for dialogue in workload.dialogues] == [4] * 8
    [system] = {dialogue.system for dialogue in workload.dialogues}
    assert len(tokenizer.encode(system).ids) == 512
    first, later, *_ = workloads.token_turns(workload.dialogues[0], tokenizer)
    # Role, words and end of the two messages, and the role of the answer.
    assert len(first[0]) == (1 + 512 + 1) + (1 + 32 + 1) + 1
    assert len(later[0]) == 1 + (1 + 32 + 1) + 1  # the answer's end first


class Echo:
    """A library that gives a token of each request a step; the token says where it stands."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []
        self.most = 0
        self._left: dict[int, int] = {}

    def submit(self, request_id: int, prompt: list[int], max_tokens: int) -> None:
        self.prompts.append(prompt)
        self._left[request_id] = max_tokens
        self.most = max(self.most, len(self._left))

    def step(self) -> list[Event]:
        events = []
        for request_id in list(self._left):
            self._left[request_id] -= 1
            is_last = self._left[request_id] == 0
            events.append(Event(1.0, request_id, [100 + self._left[request_id]], is_last))
            if is_last:
                del self._left[request_id]
        return events


def test_a_library_holds_dialogues_as_a_client_would() -> None:
    library = Echo()
    dialogues = [[([1, index], 2), ([9], 3)] for index in range(5)]
    records = hold(library, dialogues, 2)
    assert library.most == 2
    assert [sum(each["event_tokens"]) for each in records if each["turn"] == 0] == [2] * 5
    assert [each["prompt_tokens"] for each in records if each["turn"] == 1] == [5] * 5
    assert [1, 3, 101, 100, 9] in library.prompts
