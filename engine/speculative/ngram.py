"""Drafts copied from earlier text: the sequence's own, or what a request predicts.

Sources: Saxena, "Prompt Lookup Decoding", 2023; OpenAI's "Predicted Outputs".
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

_MAX_NEW = 4096  # tokens of a long prompt that are indexed at once, some milliseconds


class NgramDrafter:
    """Follows the text where a sequence's newest tokens occurred before.

    While new tokens are those of the text that is followed, nothing is looked up. When one differs,
    the newest `size` tokens are looked up: in the prediction, from where it was left on, then in
    the sequence itself, where the latest occurrence counts.

    Args:
        token_ids: prompt and output so far; grows at its end.
        num_prompt_tokens: how many of them are the prompt.
        size: tokens that must be equal before others are copied.
        prediction: what the output may be.
    """

    def __init__(
        self,
        token_ids: Sequence[int],
        *,
        num_prompt_tokens: int,
        size: int,
        prediction: Sequence[int] = (),
    ) -> None:
        self._token_ids = token_ids
        self._size = size
        self._latest: dict[tuple[int, ...], int] = {}  # n-gram → the position after it
        self._num_indexed = size - 1  # n-grams that end before this position are in `_latest`
        self._prediction = prediction
        self._predicted: dict[tuple[int, ...], list[int]] = {}
        for end in range(size, len(prediction)):
            self._predicted.setdefault(tuple(prediction[end - size : end]), []).append(end)
        # The text that is followed, and the position in it of the next token; −1: none.
        self._text, self._next = prediction, 0 if prediction else -1
        self._num_followed = num_prompt_tokens  # tokens that were compared with it
        self._left_at = 0  # where the prediction was left

    @property
    def is_predicted(self) -> bool:
        """Whether the prediction is followed."""
        return self._next >= 0 and self._text is self._prediction

    def propose(self, limit: int) -> tuple[int, ...]:
        """Up to `limit` tokens that may come next; none if nothing is known."""
        self._follow()
        self._index()
        if self._next < 0:
            self._find()
        if self._next < 0 or limit <= 0:
            return ()
        drafts = list(self._text[self._next : self._next + limit])
        if self._text is self._token_ids:
            period = len(self._token_ids) - self._next
            while len(drafts) < limit:  # a text that repeats itself goes on doing so
                drafts.append(drafts[-period])
        return tuple(drafts)

    def _follow(self) -> None:
        """Compare new tokens with the text that is followed."""
        for token_id in self._token_ids[self._num_followed :] if self._next >= 0 else ():
            if self._next >= len(self._text) or self._text[self._next] != token_id:
                if self.is_predicted:
                    self._left_at = self._next
                self._next = -1
                break
            self._next += 1
        self._num_followed = len(self._token_ids)

    def _index(self) -> None:
        """Note the n-grams that end before the newest token."""
        end = min(len(self._token_ids), self._num_indexed + _MAX_NEW)
        for position in range(self._num_indexed + 1, end):
            self._latest[tuple(self._token_ids[position - self._size : position])] = position
        self._num_indexed = max(self._num_indexed, end - 1)

    def _find(self) -> None:
        """Look the newest tokens up."""
        newest = tuple(self._token_ids[-self._size :])
        places = self._predicted.get(newest)
        if places is not None:
            number = bisect.bisect_left(places, self._left_at)
            self._text, self._next = self._prediction, places[min(number, len(places) - 1)]
        elif newest in self._latest:
            self._text, self._next = self._token_ids, self._latest[newest]
