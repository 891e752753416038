"""Token ids to text as they come: whole characters, each exactly once, cut at stop strings.

Two kinds of tokenizers, two ways. Where every token stands for certain bytes (GPT-2's kind, most
of today's), those bytes are joined. Elsewhere a token's text depends on its neighbours, and a
window of tokens is decoded each time.

`OutputText` says which text of a sequence may be shown now. It holds back half a UTF-8 character (a
token may end inside one) and any tail that could be the start of a stop string.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.engine.request import SamplingParams
from penstock.engine.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
# The window of ids decoded each time: cut back to `_KEEP` once it reaches `_WINDOW`. What is kept
# gives the next tokens their left context (SentencePiece strips a space at the start of a text).
_KEEP = 6
_WINDOW = 16


class Detokenizer(Protocol):
    """Token ids in, whole characters out."""

    def push(self, token_id: int) -> str:
        """The characters that this token completes."""

    def finish(self) -> str:
        """What is still pending, though it is no whole character."""


def new_detokenizer(
    tokenizer: Tokenizer, *, skip_special_tokens: bool, context: Sequence[int] = ()
) -> Detokenizer:
    """For one sequence of tokens.

    Args:
        context: ids that the sequence continues and that are shown already.
    """
    skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
    recent = [token_id for token_id in context if token_id not in skipped][-_KEEP:]
    if tokenizer.is_byte_level:
        return _JoinedBytes(tokenizer, skipped, recent)
    return _DecodedWindow(tokenizer, skipped, recent)


class _JoinedBytes:
    __slots__ = ("_is_in_character", "_pieces", "_skipped", "_utf8")

    def __init__(
        self, tokenizer: Tokenizer, skipped: frozenset[int], context: Sequence[int]
    ) -> None:
        self._pieces = tokenizer.pieces
        self._skipped = skipped
        self._utf8 = _new_utf8_decoder()
        self._is_in_character = False
        for token_id in context:
            self.push(token_id)

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        piece = self._pieces[token_id]
        if isinstance(piece, str):
            if not self._is_in_character:
                return piece
            piece = piece.encode()
        text = self._utf8.decode(piece)
        self._is_in_character = bool(self._utf8.getstate()[0])
        return text

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _DecodedWindow:
    """The bytes of a byte-fallback run go through an incremental UTF-8 decoder instead: the
    tokenizer would turn a whole run into U+FFFD while its last character is incomplete.
    """

    def __init__(
        self, tokenizer: Tokenizer, skipped: frozenset[int], context: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._window: list[int] = []
        self._num_shown = 0  # characters of the window's text that went out
        self._utf8 = _new_utf8_decoder()
        self._is_in_bytes = False
        self._restart_window([*context])

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        byte = self._tokenizer.byte_of_token_id.get(token_id)
        if byte is None:
            return self._leave_bytes() + self._push_piece(token_id)
        rest = "" if self._is_in_bytes else self._flush_window()
        self._is_in_bytes = True
        self._restart_window([token_id])
        return rest + self._utf8.decode(bytes([byte]))

    def finish(self) -> str:
        return self._leave_bytes() + self._flush_window()

    def _push_piece(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode()
        end = len(text) - text.endswith(_REPLACEMENT)  # its next byte may be on its way
        new = text[self._num_shown : end]
        self._num_shown = max(self._num_shown, end)
        if len(self._window) >= _WINDOW:
            # The cut may fall inside a character: the window then starts with U+FFFD, the same
            # ones every time it is decoded, so counting characters stays right.
            self._restart_window(self._window[-_KEEP:])
        return new

    def _restart_window(self, token_ids: list[int]) -> None:
        self._window = token_ids
        text = self._decode()
        self._num_shown = len(text) - (text.endswith(_REPLACEMENT) and not self._is_in_bytes)

    def _leave_bytes(self) -> str:
        if not self._is_in_bytes:
            return ""
        self._is_in_bytes = False
        rest = self._utf8.decode(b"", final=True)
        self._utf8 = _new_utf8_decoder()
        return rest

    def _flush_window(self) -> str:
        rest = self._decode()[self._num_shown :]
        self._num_shown += len(rest)
        return rest

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=False)


def _new_utf8_decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")(errors="replace")


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
