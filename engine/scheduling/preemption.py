"""Who gives up its blocks when none are free.

The victim's KV is dropped and computed again when it returns (recompute). It keeps its tokens,
so the stream only pauses.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.engine.request import Sequence


def choose_victim(running: Iterable[Sequence]) -> Sequence:
    """Lowest priority (the highest value), then latest arrival, then latest submission."""
    return max(
        running,
        key=lambda sequence: (
            sequence.request.priority,
            sequence.request.arrival_s,
            sequence.seq_id,
        ),
    )
