"""Counts that are kept up as a sequence grows equal those taken at once."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.sampling.sampling_table import TokenCounts


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(0, 60), max_size=80), min_size=2, max_size=6), st.booleans())
def test_they_equal_a_count_of_the_whole(parts, is_prompt_counted):
    sequence = list(parts[0])
    start = 0 if is_prompt_counted else len(sequence)
    counts = TokenCounts(sequence, start)
    for part in parts[1:]:
        sequence.extend(part)
        token_ids, numbers = counts.read()
        found = dict(zip(token_ids.tolist(), numbers.tolist(), strict=True))
        assert found == dict(Counter(sequence[start:]))
