"""How many of a prediction's tokens an output has."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.generation.prediction import num_accepted

tokens = st.lists(st.integers(0, 3), max_size=40)


@pytest.mark.parametrize(
    ("prediction", "output", "expected"),
    [
        ("", "abc", 0),
        ("abc", "", 0),
        ("abcdef", "abcdef", 6),
        ("abcdef", "abc", 3),
        ("abc", "abcdef", 3),
        ("abcdef", "abXdef", 5),  # another token
        ("abcdef", "abXYZcdef", 6),  # more
        ("abcdef", "adef", 4),  # fewer
        ("abcdef", "Xabcdef", 6),
        ("abcdef", "abXef", 2),  # two tokens in a row may be chance
        ("abcdef", "defabc", 3),  # not in this order
        ("abcabc", "abcabcabc", 6),  # none counts twice
        ("abcXabcYdef", "abcYdef", 7),  # the way back is told by what follows
    ],
)
def test_runs_of_tokens_count(prediction: str, output: str, expected: int) -> None:
    assert num_accepted([*map(ord, prediction)], [*map(ord, output)]) == expected


@given(tokens, tokens)
def test_no_more_than_both_have_in_order(prediction: list[int], output: list[int]) -> None:
    num = num_accepted(prediction, output)
    assert 0 <= num <= _longest_common_subsequence(prediction, output)
    assert num_accepted(prediction, prediction) == len(prediction)
    assert num_accepted(prediction, [*prediction, *output]) == len(prediction)


def _longest_common_subsequence(first: list[int], second: list[int]) -> int:
    row = [0] * (len(second) + 1)
    for token_id in first:
        before = row
        row = [0]
        for index, other in enumerate(second):
            is_same = token_id == other
            row.append(before[index] + 1 if is_same else max(row[index], before[index + 1]))
    return row[-1]
