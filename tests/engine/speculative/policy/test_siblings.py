"""Which finished output a request gets as drafts."""

from __future__ import annotations

from collections.abc import Sequence as Ordered

import pytest

from penstock.engine.request import Request, SamplingParams, Sequence
from penstock.engine.speculative.policy.siblings import MAX_TEXTS, MAX_TOKENS, Siblings

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


def add(siblings: Siblings, prompt: Ordered[int], output: Ordered[int]) -> None:
    sequence = Sequence(request(prompt), seq_id=0)
    sequence.token_ids += output
    siblings.add(sequence)


@pytest.fixture
def siblings() -> Siblings:
    found = Siblings()
    add(found, PROMPT, ANSWER)
    return found


def found(siblings: Siblings, prompt: Ordered[int], **whose: str) -> list[int]:
    return list(siblings.find(request(prompt, **whose)))


def test_an_answer_again_and_to_an_edited_question(siblings: Siblings) -> None:
    assert found(siblings, PROMPT) == ANSWER
    assert found(siblings, [*PROMPT[:20], *range(20)]) == ANSWER
    assert found(siblings, [*PROMPT[:19], *range(20)]) == []  # less than half is the same
    assert found(siblings, PROMPT[1:]) == []


def test_never_of_another_tenant_or_salt(siblings: Siblings) -> None:
    assert found(siblings, PROMPT, tenant="b") == []
    assert found(siblings, PROMPT, cache_salt="") == []


def test_the_longest_beginning_counts_then_the_latest(siblings: Siblings) -> None:
    add(siblings, [*PROMPT[:30], 1], [4])
    add(siblings, [*PROMPT[:30], 2], [5])
    assert found(siblings, [*PROMPT[:30], 3]) == [5]
    assert found(siblings, [*PROMPT[:30], 1]) == [4]
    assert found(siblings, [*PROMPT[:30], 3]) == [4]  # the last used
    assert found(siblings, PROMPT) == ANSWER
    add(siblings, PROMPT, [6])
    assert found(siblings, PROMPT) == [6]


@pytest.mark.parametrize(
    "dropped", [[*PROMPT, *ANSWER], [*PROMPT, *ANSWER, 1, 2, 3], PROMPT, PROMPT[:5], [*PROMPT, 1]]
)
def test_it_is_forgotten_with_its_tokens(siblings: Siblings, dropped: list[int]) -> None:
    siblings.drop([5, *dropped], cache_salt="s")
    siblings.drop(dropped, cache_salt="")
    assert found(siblings, PROMPT) == ANSWER
    siblings.drop(dropped, cache_salt="s")
    assert found(siblings, PROMPT) == []
    assert siblings.num_tokens == 0


def test_it_is_bounded_and_keeps_what_is_used(siblings: Siblings) -> None:
    for number in range(2 * MAX_TEXTS):
        add(siblings, [number], [1, 2])
        assert found(siblings, PROMPT) == ANSWER
    assert found(siblings, [0]) == []
    assert siblings.num_tokens == 3 * (MAX_TEXTS - 1) + len(PROMPT) + len(ANSWER)
    for number in range(8):
        add(siblings, [number] * (MAX_TOKENS // 4), [1])
        assert siblings.num_tokens <= MAX_TOKENS
    assert found(siblings, [7] * (MAX_TOKENS // 4)) == [1]
    add(siblings, [1] * MAX_TOKENS, [1])  # it would be all there is
    assert found(siblings, [7] * (MAX_TOKENS // 4)) == [1]
    add(siblings, [9], [])
    assert found(siblings, [9]) == []
