"""What the drafter proposes, against a search through the whole text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.speculative.policy.ngram import NgramDrafter

SIZE = 3


def drafter(token_ids: list[int], prediction: list[int] | None = None) -> NgramDrafter:
    return NgramDrafter(
        token_ids,
        num_prompt_tokens=len(token_ids),
        sizes=[SIZE],
        prediction=prediction or [],
    )


def test_copies_what_followed_the_latest_occurrence():
    token_ids = [1, 2, 3, 4, 1, 2, 3, 5, 6, 7, 1, 2, 3]
    assert drafter(token_ids).propose(3) == (5, 6, 7)


def test_proposes_nothing_without_an_occurrence():
    token_ids = [1, 2, 3, 4, 5]
    assert drafter(token_ids).propose(4) == ()
    assert drafter([1]).propose(4) == ()


def test_follows_without_another_look():
    token_ids = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3]
    found = drafter(token_ids)
    assert found.propose(2) == (4, 5)
    token_ids += [4, 5]
    assert found.propose(2) == (6, 7)
    token_ids.append(9)
    assert found.propose(2) == ()


def test_a_repetition_goes_on():
    assert drafter([8, 1, 2, 1, 2, 1, 2]).propose(5) == (1, 2, 1, 2, 1)


def test_a_prediction_is_followed_left_and_found_again():
    prediction = [10, 11, 12, 13, 14, 15, 16, 17, 18]
    token_ids = [1, 2]
    found = drafter(token_ids, prediction)
    assert found.propose(2) == (10, 11)
    assert found.is_predicted
    token_ids += [10, 11, 99]  # another token than predicted
    assert found.propose(2) == ()
    token_ids += [13, 14, 15]
    assert found.propose(9) == (16, 17, 18)
    token_ids += [16, 17, 18]
    assert found.propose(9) == ()  # it ends


def test_a_prediction_is_found_again_after_where_it_was_left():
    prediction = [1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3, 6]
    token_ids = [9]
    found = drafter(token_ids, prediction)
    token_ids += [1, 2, 3, 4, 1, 7, 1, 2, 3]
    assert found.propose(1) == (5,)


def test_a_sibling_comes_after_the_prediction():
    token_ids = [1, 2]
    found = NgramDrafter(
        token_ids,
        num_prompt_tokens=2,
        sizes=[SIZE],
        prediction=[10, 11, 12, 13, 14, 15],
        sibling=[20, 21, 22, 23, 10, 11, 12, 99, 24],
    )
    assert found.propose(2) == (10, 11)
    token_ids += [20, 21, 22]
    assert found.propose(1) == (23,)
    assert not found.is_predicted
    token_ids += [9, 10, 11, 12]
    assert found.propose(1) == (13,)
    assert found.is_predicted


def test_a_sibling_is_followed_from_its_beginning():
    found = NgramDrafter([1, 2], num_prompt_tokens=2, sizes=[SIZE], sibling=[20, 21])
    assert found.propose(3) == (20, 21)
    assert not found.is_predicted


def test_the_longest_occurrence_counts_in_every_text():
    text = [7, 1, 2, 3, 40, 8, 1, 2, 3, 50, 1, 2, 3, 60]

    def drafts(max_size: int, **texts: list[int]) -> tuple[int, ...]:
        own = [] if texts else text
        found = NgramDrafter(
            token_ids := [*own, 9], num_prompt_tokens=0, sizes=range(max_size, 1, -1), **texts
        )
        token_ids += [7, 1, 2, 3]
        return found.propose(1)

    for texts in ({}, {"prediction": text}, {"sibling": text}):
        assert drafts(4, **texts) == drafts(16, **texts) == (40,)
    assert drafts(3) == (60,)  # the latest
    assert drafts(3, prediction=text) == (40,)  # the first after where it was left


@given(st.lists(st.integers(0, 2), max_size=60), st.integers(1, 4), st.integers(0, 4))
def test_no_longer_occurrence_is_missed(token_ids: list[int], min_size: int, more: int):
    sizes = range(min_size + more, min_size - 1, -1)
    found = NgramDrafter(token_ids, num_prompt_tokens=0, sizes=sizes)
    drafts = found.propose(1)
    for size in sizes:
        newest, ends = token_ids[-size:], range(size, len(token_ids))
        places = [end for end in ends if token_ids[end - size : end] == newest]
        if places:
            assert drafts == (token_ids[places[-1]],)
            return
    assert drafts == ()


@given(st.lists(st.integers(0, 3), max_size=80), st.lists(st.integers(1, 5), max_size=20))
def test_in_any_text(token_ids: list[int], steps: list[int]):
    """After any number of new tokens the drafts are what followed an earlier occurrence of the
    newest `SIZE` tokens, if there is one."""
    whole, grown = token_ids, token_ids[:10]
    found = drafter(grown)
    for number in [0, *steps]:
        grown += whole[len(grown) : len(grown) + number]
        drafts = found.propose(4)
        newest = grown[-SIZE:]
        places = [end for end in range(SIZE, len(grown)) if grown[end - SIZE : end] == newest]
        if len(grown) < SIZE or not places:
            assert drafts == ()
            continue
        assert len(drafts) == 4
        continued = [(grown[end:] + list(drafts))[: len(drafts)] for end in places]
        assert list(drafts) in continued


@given(
    st.lists(st.integers(0, 2), max_size=80),
    st.lists(st.integers(1, 5), max_size=20),
    st.integers(0, 12),
)
def test_no_draft_without_its_evidence(
    token_ids: list[int], steps: list[int], num_matched: int
) -> None:
    """What is drafted followed as many equal tokens as were asked for, however it was found; and
    what is copied from a sibling's beginning on has matched as far."""
    grown, sibling = token_ids[:10], token_ids[10:40]
    found = NgramDrafter(grown, num_prompt_tokens=len(grown), sizes=(8, SIZE), sibling=sibling)
    for number in [0, *steps]:
        grown += token_ids[len(grown) : len(grown) + number]
        drafts = found.propose(4, num_matched=num_matched)
        assert found.num_matched >= num_matched or not drafts
        if not drafts:
            continue
        newest = grown[len(grown) - found.num_matched :]
        followers = [
            text[end]
            for text in (grown, sibling)
            for end in range(len(newest), len(text))
            if text[end - len(newest) : end] == newest
        ]
        assert drafts[0] in followers
