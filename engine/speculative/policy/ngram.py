"""Drafts copied from other text: what a request predicts, a sibling's output, the sequence's own.

Sources: Saxena, "Prompt Lookup Decoding", 2023; OpenAI's "Predicted Outputs".
"""

from __future__ import annotations

import bisect
from array import array
from collections.abc import Sequence

from penstock.engine.speculative.ngrams import positions_after

_MAX_NEW = 4096  # tokens of a long prompt that are indexed at once, about a millisecond
_MAX_COMPARED = 32  # tokens before the place that is followed


class NgramDrafter:
    """Follows the text where a sequence's newest tokens occurred before.

    While new tokens are those of the text that is followed, nothing is looked up. When one differs,
    the newest tokens are looked up: in the prediction, then in the sibling, from where they were
    left on, then in the sequence itself, where the latest occurrence counts. In each text as many
    of them as occur there, of the sizes that are looked up.

    Args:
        token_ids: prompt and output so far; grows at its end.
        num_prompt_tokens: how many of them are the prompt.
        sizes: how many of the newest tokens are looked up, the most first.
        prediction: what the output may be.
        sibling: the output of a sequence that begins alike.
    """

    def __init__(
        self,
        token_ids: Sequence[int],
        *,
        num_prompt_tokens: int,
        sizes: Sequence[int],
        prediction: Sequence[int] = (),
        sibling: Sequence[int] = (),
    ) -> None:
        self._token_ids = token_ids
        self._sizes = sizes
        self._ngrams = [_LatestNgrams(token_ids, size) for size in sizes]
        self._prediction = prediction
        self._guides = [_Guide(text) for text in (prediction, sibling) if len(text)]
        # The text that is followed (None: the sequence itself), and the position in it of the next
        # token; −1: nothing is followed.
        self._guide = self._guides[0] if self._guides else None
        self._next = 0 if self._guides else -1
        self._num_followed = num_prompt_tokens  # tokens that were compared with it
        self._first = self._next  # where it is followed from, after these equal tokens before it:
        self._num_before = 0

    @property
    def num_matched(self) -> int:
        """How many of the newest tokens are those of the text that is followed, as far as they were
        compared; 0 if none is."""
        return 0 if self._next < 0 else self._num_before + self._next - self._first

    @property
    def is_predicted(self) -> bool:
        """Whether the prediction is followed."""
        return self._next >= 0 and self._text is self._prediction

    @property
    def _text(self) -> Sequence[int]:
        return self._token_ids if self._guide is None else self._guide.text

    def propose(self, limit: int, *, num_matched: int = 0) -> tuple[int, ...]:
        """Up to `limit` tokens that may come next; none if nothing is known.

        Args:
            num_matched: so many must be, of a text that is no prediction.
        """
        self._follow()
        if self._next < 0:
            # Longer ones where more must match: nothing is indexed that cannot be enough.
            enough = [each for each in self._sizes if each >= num_matched] or self._sizes[:1]
            self._find(enough)
        if self._next < 0 or limit <= 0:
            return ()
        if self.num_matched < num_matched and not self.is_predicted:
            return ()
        drafts = list(self._text[self._next : self._next + limit])
        if self._guide is None:
            period = len(self._token_ids) - self._next
            while len(drafts) < limit:  # a text that repeats itself goes on doing so
                drafts.append(drafts[-period])
        return tuple(drafts)

    def _follow(self) -> None:
        """Compare new tokens with the text that is followed."""
        text = self._text
        for token_id in self._token_ids[self._num_followed :] if self._next >= 0 else ():
            if self._next >= len(text) or text[self._next] != token_id:
                if self._guide is not None:
                    self._guide.left_at = self._next
                self._next = -1
                break
            self._next += 1
        self._num_followed = len(self._token_ids)

    def _find(self, sizes: Sequence[int]) -> None:
        """Look the newest tokens up, in a prediction as many as may be."""
        for guide in self._guides:
            for size in self._sizes if guide.text is self._prediction else sizes:
                place = guide.find(tuple(self._token_ids[-size:]), size)
                if place is not None:
                    self._follow_from(guide, place, size)
                    return
        for ngrams in self._ngrams[: len(sizes)]:
            place = ngrams.find_newest()
            if place is not None:
                self._follow_from(None, place, ngrams.size)
                return

    def _follow_from(self, guide: _Guide | None, place: int, num_matched: int) -> None:
        """Follow a text whose tokens before `place` are the newest, so many at least."""
        self._guide, self._next, self._first = guide, place, place
        text, token_ids = self._text, self._token_ids
        most = min(_MAX_COMPARED, place, len(token_ids))
        while num_matched < most and text[place - num_matched - 1] == token_ids[-num_matched - 1]:
            num_matched += 1
        self._num_before = num_matched


class _LatestNgrams:
    """Where in a text its newest tokens occurred last.

    Args:
        token_ids: the text, which grows at its end.
        size: how many are looked up.
    """

    def __init__(self, token_ids: Sequence[int], size: int) -> None:
        self.size = size
        self._token_ids = token_ids
        # N-gram, as bytes, which are made and hashed fast → the position after it; of those that
        # end at `_num_indexed` or before.
        self._latest: dict[bytes, int] = {}
        self._num_indexed = size - 1

    def find_newest(self) -> int | None:
        """The position after the latest occurrence before the end."""
        token_ids, size, latest = self._token_ids, self.size, self._latest
        num_tokens, position = len(token_ids), self._num_indexed
        if num_tokens <= position:
            return None
        end = min(num_tokens, position + _MAX_NEW)
        packed = array("I", token_ids[position + 1 - size : end]).tobytes()
        num_bytes = 4 * size
        for first in range(0, 4 * (end - 1 - position), 4):
            position += 1
            latest[packed[first : first + num_bytes]] = position
        self._num_indexed = position
        if end < num_tokens:
            packed = array("I", token_ids[-size:]).tobytes()
        return latest.get(packed[-num_bytes:])


class _Guide:
    """A text that the output may follow.

    Attributes:
        left_at: the position at which the output was last another.
    """

    def __init__(self, text: Sequence[int]) -> None:
        self.text = text
        self.left_at = 0
        # By size, as they are first wanted.
        self._places: dict[int, dict[tuple[int, ...], list[int]]] = {}

    def find(self, newest: tuple[int, ...], size: int) -> int | None:
        """The position after these tokens, as many as `size` or too few, from where the text was
        left on if they are there."""
        if size not in self._places:
            self._places[size] = positions_after(self.text[:-1], size)  # nothing follows the last
        places = self._places[size].get(newest)
        if places is None:
            return None
        number = bisect.bisect_left(places, self.left_at)
        return places[min(number, len(places) - 1)]
