"""Where the n-grams of a text occur."""

from __future__ import annotations

from collections.abc import Sequence


def positions_after(token_ids: Sequence[int], size: int) -> dict[tuple[int, ...], list[int]]:
    """Each n-gram of this size → the positions after it, in order."""
    found: dict[tuple[int, ...], list[int]] = {}
    ngrams = zip(*(token_ids[start:] for start in range(size)), strict=False)
    for end, ngram in enumerate(ngrams, size):
        found.setdefault(ngram, []).append(end)
    return found
