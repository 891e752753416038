"""One sequence's output as text: detokenised as it comes, cut at stop strings.

Fed token ids, it says which text may be shown now. It holds back half a UTF-8 character (a
token may end inside one) and any tail that could be the start of a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.engine.request import SamplingParams
from penstock.engine.text.detokenizer import new_detokenizer
from penstock.engine.text.tokenizer import Tokenizer


@dataclass(slots=True, kw_only=True)  # not frozen: made for every token
class TextDelta:
    """What a push made showable.

    Attributes:
        num_tokens: how many of the pushed ids count; fewer than pushed when a stop string was
            found before the last of them (the overshoot is dropped).
        stop: the stop string that ended the text, if one did.
    """

    text: str
    num_tokens: int
    stop: str | None = None


class OutputText:
    """The text of one sequence: a detokenizer and, behind it, the search for stop strings.

    Args:
        context: ids that the output continues and that are shown already: a SentencePiece
            tokenizer drops the space at the start of a text, but not in its middle.
    """

    __slots__ = (
        "_detokenizer", "_held", "_includes_stop", "_is_stopped", "_min_tokens", "_num_tokens",
        "_stops",
    )  # fmt: skip

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, *, context: Sequence[int] = ()
    ) -> None:
        self._detokenizer = new_detokenizer(
            tokenizer, skip_special_tokens=params.skip_special_tokens, context=context
        )
        self._stops = tuple(stop for stop in params.stop if stop)
        self._includes_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._held = ""  # decoded, but possibly the start of a stop string
        self._is_stopped = False

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Take the next ids; after a stop string, everything further is dropped."""
        if not self._stops:
            detokenise = self._detokenizer.push
            if len(token_ids) == 1:
                return TextDelta(text=detokenise(token_ids[0]), num_tokens=1)
            return TextDelta(text="".join(map(detokenise, token_ids)), num_tokens=len(token_ids))
        pieces: list[str] = []
        num_tokens = 0
        for token_id in token_ids:
            if self._is_stopped:
                break
            num_tokens += 1
            self._num_tokens += 1
            text, stop = self._scan(self._detokenizer.push(token_id))
            pieces.append(text)
            if stop is not None:
                self._is_stopped = True
                return TextDelta(text="".join(pieces), num_tokens=num_tokens, stop=stop)
        return TextDelta(text="".join(pieces), num_tokens=num_tokens)

    def finish(self) -> TextDelta:
        """The end of the sequence: everything held back, cut at a stop string in it."""
        if self._is_stopped:
            return TextDelta(text="", num_tokens=0)
        text, stop = self._scan(self._detokenizer.finish())
        self._is_stopped = True
        rest, self._held = self._held, ""
        return TextDelta(text=text if stop is not None else text + rest, num_tokens=0, stop=stop)

    def _scan(self, new: str) -> tuple[str, str | None]:
        if not self._stops or not new:
            return new, None
        text = self._held + new
        if self._num_tokens > self._min_tokens:
            found = self._first_stop(text)
            if found is not None:
                start, stop = found
                self._held = ""
                return text[: start + len(stop)] if self._includes_stop else text[:start], stop
        num_held = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held], None

    def _first_stop(self, text: str) -> tuple[int, str] | None:
        # The one that ends first is the one a reader would have seen first; of those the longest.
        hits = [(start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        return min(hits, key=lambda hit: (hit[0] + len(hit[1]), hit[0])) if hits else None


def _overlap(text: str, stop: str) -> int:
    """Length of the longest tail of `text` that starts `stop` without completing it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0
