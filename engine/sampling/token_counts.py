"""How often each token occurs in a sequence that grows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class TokenCounts:
    """Distinct tokens and their counts. A long prompt is counted once; then only what is new is.

    Args:
        token_ids: grows at its end.
        start: tokens before this position, all there, do not count.
    """

    def __init__(self, token_ids: Sequence[int], start: int) -> None:
        self._sequence = token_ids
        self._num_seen = start
        self._places: dict[int, int] = {}
        self._token_ids = np.empty(16, dtype=np.int64)
        self._counts = np.zeros(16, dtype=np.float32)

    def read(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Token ids and counts so far; good until the next call."""
        for token_id, count in Counter(self._sequence[self._num_seen :]).items():
            place = self._place_of(token_id)
            self._counts[place] += count
        self._num_seen = len(self._sequence)
        num_distinct = len(self._places)
        return self._token_ids[:num_distinct], self._counts[:num_distinct]

    def _place_of(self, token_id: int) -> int:
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._counts):
            self._token_ids = np.concatenate((self._token_ids, np.empty_like(self._token_ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._token_ids[place] = token_id
        return place
