"""Which finished output a request gets as drafts."""

from __future__ import annotations

from collections.abc import Sequence as Ordered

import pytest

from penstock.engine.request import Request, SamplingParams, Sequence
from penstock.engine.speculative.policy.finished_outputs import (
    MAX_TEXTS,
    MAX_TOKENS,
    FinishedOutputs,
)

PROMPT = list(range(100, 140))
ANSWER = [7, 8, 9]


def request(prompt: Ordered[int], *, tenant: str = "a", cache_salt: str = "s") -> Request:
    return Request(
        request_id="r",
        prompt_token_ids=tuple(prompt),
        sampling_params=SamplingParams(),
        tenant=tenant,
        cache_salt=cache_salt,
    )


def add(finished: FinishedOutputs, prompt: Ordered[int], output: Ordered[int]) -> None:
    sequence = Sequence(request(prompt), seq_id=0)
    sequence.token_ids += output
    finished.add(sequence)


@pytest.fixture
def finished() -> FinishedOutputs:
    found = FinishedOutputs()
    add(found, PROMPT, ANSWER)
    return found


def found(finished: FinishedOutputs, prompt: Ordered[int], **whose: str) -> list[int]:
    return list(finished.find(request(prompt, **whose)))


def test_an_answer_again_and_to_an_edited_question(finished: FinishedOutputs) -> None:
    assert found(finished, PROMPT) == ANSWER
    assert found(finished, [*PROMPT[:20], *range(20)]) == ANSWER
    assert found(finished, [*PROMPT[:19], *range(20)]) == []  # less than half is the same
    assert found(finished, PROMPT[1:]) == []


def test_never_of_another_tenant_or_salt(finished: FinishedOutputs) -> None:
    assert found(finished, PROMPT, tenant="b") == []
    assert found(finished, PROMPT, cache_salt="") == []


def test_the_longest_beginning_counts_then_the_latest(finished: FinishedOutputs) -> None:
    add(finished, [*PROMPT[:30], 1], [4])
    add(finished, [*PROMPT[:30], 2], [5])
    assert found(finished, [*PROMPT[:30], 3]) == [5]
    assert found(finished, [*PROMPT[:30], 1]) == [4]
    assert found(finished, [*PROMPT[:30], 3]) == [4]  # the last used
    assert found(finished, PROMPT) == ANSWER
    add(finished, PROMPT, [6])
    assert found(finished, PROMPT) == [6]


@pytest.mark.parametrize(
    "dropped", [[*PROMPT, *ANSWER], [*PROMPT, *ANSWER, 1, 2, 3], PROMPT, PROMPT[:5], [*PROMPT, 1]]
)
def test_it_is_forgotten_with_its_tokens(finished: FinishedOutputs, dropped: list[int]) -> None:
    finished.drop([5, *dropped], cache_salt="s")
    finished.drop(dropped, cache_salt="")
    assert found(finished, PROMPT) == ANSWER
    finished.drop(dropped, cache_salt="s")
    assert found(finished, PROMPT) == []
    assert finished.num_tokens == 0


def test_it_is_bounded_and_keeps_what_is_used(finished: FinishedOutputs) -> None:
    for number in range(2 * MAX_TEXTS):
        add(finished, [number], [1, 2])
        assert found(finished, PROMPT) == ANSWER
    assert found(finished, [0]) == []
    assert finished.num_tokens == 3 * (MAX_TEXTS - 1) + len(PROMPT) + len(ANSWER)
    for number in range(8):
        add(finished, [number] * (MAX_TOKENS // 4), [1])
        assert finished.num_tokens <= MAX_TOKENS
    assert found(finished, [7] * (MAX_TOKENS // 4)) == [1]
    add(finished, [1] * MAX_TOKENS, [1])  # it would be all there is
    assert found(finished, [7] * (MAX_TOKENS // 4)) == [1]
    add(finished, [9], [])
    assert found(finished, [9]) == []
