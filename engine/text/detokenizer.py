"""Streaming token ids to text: whole characters, each exactly once, cut at stop strings.

If every token stands for certain bytes (byte-level tokenizers such as GPT-2's, and most of
today's), those bytes are joined. Otherwise a token's text depends on its neighbours, and a window
of tokens is decoded each time.

`OutputText` decides which text of a sequence may be sent. It holds back an incomplete UTF-8
character (a token may end inside one) and any tail that could be the start of a stop string.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from penstock.engine.request import SamplingParams
from penstock.engine.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
# The window of ids decoded each time is cut to its last `_KEEP` ids when it reaches `_WINDOW`: the
# next tokens need left context (SentencePiece strips a space at the start of a text).
_KEEP = 6
_WINDOW = 16


class Detokenizer(Protocol):
    """Token ids in, whole characters out."""

    def push(self, token_id: int) -> str:
        """The characters that this token completes."""

    def finish(self) -> str:
        """The pending bytes, although they are not a whole character."""


def new_detokenizer(
    tokenizer: Tokenizer,
    *,
    skip_special_tokens: bool,
    context: Sequence[int] = (),
    shown: frozenset[int] = frozenset(),
    joined: bool = False,
) -> Detokenizer:
    """For one sequence of tokens.

    Args:
        context: ids before the sequence, whose text was already shown.
        shown: special tokens that are never skipped.
        joined: the tokenizer's spaces between added tokens are left out.
    """
    if joined:
        plain = new_detokenizer(
            tokenizer, skip_special_tokens=skip_special_tokens, context=context, shown=shown
        )
        return _JoinedTokens(plain, frozenset(tokenizer.added_tokens.values()))
    skipped = tokenizer.special_token_ids - shown if skip_special_tokens else frozenset()
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


class _JoinedTokens:
    """Another detokenizer without the spaces between added tokens in a row, as in vLLM."""

    def __init__(self, plain: Detokenizer, added: frozenset[int]) -> None:
        self._plain = plain
        self._added = added
        self._is_after_added = False

    def push(self, token_id: int) -> str:
        text = self._plain.push(token_id)
        is_added = token_id in self._added
        if is_added and self._is_after_added:
            text = text.removeprefix(" ")
        self._is_after_added = is_added
        return text

    def finish(self) -> str:
        return self._plain.finish()


class _DecodedWindow:
    """Bytes of a byte-fallback run go through an incremental UTF-8 decoder instead: the tokenizer
    would turn the whole run into U+FFFD while its last character is incomplete.
    """

    def __init__(
        self, tokenizer: Tokenizer, skipped: frozenset[int], context: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._window: list[int] = []
        self._num_shown = 0  # characters of the window's text that were returned
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
        end = len(text) - text.endswith(_REPLACEMENT)  # its next byte may follow
        new = text[self._num_shown : end]
        self._num_shown = max(self._num_shown, end)
        if len(self._window) >= _WINDOW:
            # The cut may fall inside a character: the window then starts with U+FFFD, the same
            # number of them every time it is decoded, so counting characters stays right.
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


def with_special_stops(
    params: SamplingParams, tokenizer: Tokenizer, *, vocab_size: int
) -> SamplingParams:
    """Parameters with which a stop string that is the text of a special token, such as
    `<|im_end|>`, ends the output at that token: its text may be left out of the output, where the
    string would never be found."""
    new = tuple(
        token_id
        for token_id in _special_stops(params, tokenizer)
        if token_id < vocab_size and token_id not in params.stop_token_ids
    )
    if not new:
        return params
    return msgspec.structs.replace(params, stop_token_ids=(*params.stop_token_ids, *new))


def _special_stops(params: SamplingParams, tokenizer: Tokenizer) -> list[int]:
    """The special tokens that stop strings are the texts of."""
    known = (tokenizer.added_tokens.get(stop.strip()) for stop in params.stop)
    return [each for each in known if each in tokenizer.special_token_ids]


class TextDelta(msgspec.Struct, gc=False):
    """The text that a push released.

    Attributes:
        num_tokens: how many of the pushed ids count; fewer than pushed if a stop string was
            found before the last of them (the rest is dropped).
        stop: the stop string that ended the text, if one did.
    """

    text: str
    num_tokens: int
    stop: str | None = None


class OutputText:
    """The text of one sequence: a detokenizer followed by the search for stop strings.

    Args:
        context: ids before the output, whose text was already shown: a SentencePiece tokenizer
            drops the space at the start of a text, but not in its middle.
        shown: special tokens that are never skipped.
    """

    __slots__ = (
        "_detokenizer", "_held", "_includes_stop", "_is_stopped", "_min_tokens", "_num_tokens",
        "_stops",
    )  # fmt: skip

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        *,
        context: Sequence[int] = (),
        shown: frozenset[int] = frozenset(),
    ) -> None:
        if params.include_stop_str_in_output and params.stop:
            shown |= frozenset(_special_stops(params, tokenizer))
        self._detokenizer = new_detokenizer(
            tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            context=context,
            shown=shown,
            joined=not (params.skip_special_tokens or params.spaces_between_special_tokens),
        )
        self._stops = tuple(stop for stop in params.stop if stop)
        self._includes_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._held = ""  # decoded text that may be the start of a stop string
        self._is_stopped = False

    @property
    def plain_push(self) -> Callable[[int], str] | None:
        """Adds one id and returns its text, if that is all there is to a push: nothing stops the
        text. Otherwise None."""
        return None if self._stops else self._detokenizer.push

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Add the next ids; everything after a stop string is dropped."""
        if not self._stops:
            detokenise = self._detokenizer.push
            if len(token_ids) == 1:
                return TextDelta(detokenise(token_ids[0]), 1)
            return TextDelta("".join(map(detokenise, token_ids)), len(token_ids))
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
                return TextDelta("".join(pieces), num_tokens, stop)
        return TextDelta("".join(pieces), num_tokens)

    def finish(self) -> TextDelta:
        """End the sequence: return the text held back, cut at a stop string in it."""
        if self._is_stopped:
            return TextDelta("", 0)
        text, stop = self._scan(self._detokenizer.finish())
        self._is_stopped = True
        rest, self._held = self._held, ""
        return TextDelta(text if stop is not None else text + rest, 0, stop)

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
        # The stop string that ends first; of several that end together, the longest.
        hits = [(start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        return min(hits, key=lambda hit: (hit[0] + len(hit[1]), hit[0])) if hits else None


def _overlap(text: str, stop: str) -> int:
    """Length of the longest tail of `text` that is a proper prefix of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0
