"""Drafts copied from other text: what a request predicts, a sibling's output, the sequence's own.

Sources: Saxena, "Prompt Lookup Decoding", 2023; OpenAI's "Predicted Outputs".
"""

from __future__ import annotations

from collections.abc import Sequence

_NUM_CHARACTERS = 0x110000
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
        self._own = _Searched(token_ids)
        self._guides = [_Searched(text) for text in (prediction, sibling) if len(text)]
        self._predicted = self._guides[0] if len(prediction) else None
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
        return self._next >= 0 and self._guide is not None and self._guide is self._predicted

    @property
    def _text(self) -> Sequence[int]:
        return self._token_ids if self._guide is None else self._guide.text

    def propose(self, limit: int, *, num_matched: int = 0) -> tuple[int, ...]:
        """Up to `limit` tokens that may come next; none if nothing is known.

        Args:
            num_matched: so many must be, of a text that is no prediction.
        """
        if self._next >= 0:
            self._follow()
        if self._next < 0:
            self._find(num_matched)
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
        for token_id in self._token_ids[self._num_followed :]:
            if self._next >= len(text) or text[self._next] != token_id:
                if self._guide is not None:
                    self._guide.left_at = self._next
                self._next = -1
                break
            self._next += 1
        self._num_followed = len(self._token_ids)

    def _find(self, num_matched: int) -> None:
        """Look the newest tokens up; none that cannot be enough, but in a prediction."""
        characters = self._own.grown()
        least = min(num_matched, self._sizes[0])
        for guide in self._guides:
            for size in self._sizes:
                if size < least and guide is not self._predicted:
                    break
                place = guide.find(characters[-size:]) if size <= len(characters) else 0
                if place > 0:
                    self._follow_from(guide, place, size)
                    return
        end = len(characters) - 1  # nothing follows the newest themselves
        for size in self._sizes:
            if size < least:
                break
            place = characters.rfind(characters[-size:], 0, end)
            if 0 <= place <= end - size:
                self._follow_from(None, place + size, size)
                return

    def _follow_from(self, guide: _Searched | None, place: int, num_matched: int) -> None:
        """Follow a text whose tokens before `place` are the newest, so many at least."""
        self._guide, self._next, self._first = guide, place, place
        self._num_followed = len(self._token_ids)
        text, token_ids = self._text, self._token_ids
        most = min(_MAX_COMPARED, place, len(token_ids))
        while num_matched < most and text[place - num_matched - 1] == token_ids[-num_matched - 1]:
            num_matched += 1
        self._num_before = num_matched


class _Searched:
    """A text of tokens in which others are looked up, each as a character: Python finds characters
    in C, a thousand in about a microsecond.

    Args:
        text: may grow at its end.

    Attributes:
        left_at: the position at which the output, which followed it, was another.
    """

    def __init__(self, text: Sequence[int]) -> None:
        self.text = text
        self.left_at = 0
        self._characters = ""

    def grown(self) -> str:
        """The whole text."""
        new = self.text[len(self._characters) :]
        try:
            self._characters += "".join(map(chr, new))
        except ValueError:  # in no known vocabulary; some tokens are taken for others
            self._characters += "".join(chr(token_id % _NUM_CHARACTERS) for token_id in new)
        return self._characters

    def find(self, newest: str) -> int:
        """The position after these, but not the last: from where the text was left on if they are
        there. 0: nowhere."""
        characters, size = self._characters or self.grown(), len(newest)
        end = len(characters) - 1
        place = characters.find(newest, max(0, self.left_at - size), end)
        if place < 0:
            place = characters.rfind(newest, 0, end)
        return 0 if place < 0 else place + size
