"""What a request predicts of its output, compared with what the output was.

The tokens are compared, not the drafts that an engine happened to make of them: so the counts are
the same whatever else runs, and whether or not an engine dies.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

_MIN_RUN = 3  # tokens; as many must be equal before an engine drafts from a prediction again


def num_accepted(prediction: Sequence[int], output: Sequence[int]) -> int:
    """How many of a prediction's tokens the output has, in the prediction's order.

    Counted are the tokens with which both begin and, after each difference, those from the next
    three in a row on that the rest of the prediction has too. Takes 1 to 3 µs per token.
    """
    num, position, is_followed = 0, 0, True
    num_others = 0  # newest tokens of the output that are not counted
    ends: dict[tuple[int, ...], list[int]] | None = None
    for index, token_id in enumerate(output, 1):
        if is_followed and position < len(prediction) and prediction[position] == token_id:
            position += 1
            num += 1
            continue
        num_others = 1 if is_followed else num_others + 1
        is_followed = False
        if ends is None:
            ends = _ends(prediction)
        if num_others < _MIN_RUN:
            continue
        found = ends.get(tuple(output[index - _MIN_RUN : index]), ())
        number = bisect.bisect_left(found, position + _MIN_RUN)
        if number < len(found):
            position, is_followed = found[number], True
            num += _MIN_RUN
    return num


def _ends(prediction: Sequence[int]) -> dict[tuple[int, ...], list[int]]:
    """Each run of `_MIN_RUN` tokens → the positions after it, in order."""
    found: dict[tuple[int, ...], list[int]] = {}
    runs = zip(*(prediction[start:] for start in range(_MIN_RUN)), strict=False)
    for end, run in enumerate(runs, _MIN_RUN):
        found.setdefault(run, []).append(end)
    return found
