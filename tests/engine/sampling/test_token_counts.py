"""Counts that are kept up as a sequence grows equal those taken at once."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.sampling.sampling_table import TokenCounts


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 60), max_size=80), min_size=2, max_size=6),
    st.lists(st.integers(0, 60), max_size=5),
    st.booleans(),
)
def test_they_equal_a_count_of_the_whole(parts, drafts, is_prompt_counted):
    """Drafts at the sequence's end, of which none stays, are counted for themselves only."""
    sequence = list(parts[0])
    start = 0 if is_prompt_counted else len(sequence)
    counts = TokenCounts(sequence, start)
    for part in parts[1:]:
        sequence.extend(part)
        num_known = len(sequence)
        sequence.extend(drafts)
        for number in range(len(drafts) + 1):
            token_ids, numbers = counts.read(num_known + number, num_drafts=number)
            found = dict(zip(token_ids.tolist(), numbers.tolist(), strict=True))
            assert found == dict(Counter(sequence[start : num_known + number]))
        del sequence[num_known:]
