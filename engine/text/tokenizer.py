"""A model's tokenizer: the few calls of `tokenizers` that serving needs."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
import tokenizers.decoders
import tokenizers.models

from penstock.engine.errors import InvalidRequestError, ModelLoadError, PromptTooLongError
from penstock.engine.model_files.json_file import MAX_TEXT_BYTES, check_file
from penstock.engine.process.native_panics import PANICS_HIDDEN, is_panic

_MAX_CHAR_BYTES = 4
_REWRITING = frozenset({"ByteLevel", "Metaspace", "Prepend", "Replace"})
_MAX_REASON_CHARS = 200
_MANY_CHARS = 1024
_SPACE = 0x20
_REPEATED_GROUP = re.compile(r"\)[*+{]")
_NOTHING = contextlib.nullcontext()
_MANY_TOKENS = 4096  # from here on decoding would hold the GIL for noticeably long


class Tokenizer:
    """Text ↔ token ids. Threads may share it: calls keep no state."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        # A tokenizer.json may enable padding and truncation, left over from training.
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self._byte_of_char = byte_level_alphabet()
        self.special_token_ids = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )
        self.added_tokens = {
            token.content: token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
        }
        # Text is split at these tokens first, so that the parts on either side are tokenised
        # independently.
        self.boundary_tokens = {
            token_id: token.content
            for token_id, token in backend.get_added_tokens_decoder().items()
            if not (token.lstrip or token.single_word or token.normalized)
        }
        # A shorter text cannot make a regular expression try too often.
        self._panics_from_chars = 0 if _repeats_groups(backend) else _MANY_CHARS
        # As in GPT-2: a token stands for the same bytes wherever it is.
        self.is_byte_level = isinstance(backend.decoder, tokenizers.decoders.ByteLevel)
        self.pieces = _Pieces(self)
        # SentencePiece's byte fallback: ids that stand for one byte each, as <0xNN>.
        self.byte_of_token_id = _byte_fallback_ids(backend)

    @classmethod
    def from_directory(cls, path: Path) -> Tokenizer:
        """Read `tokenizer.json`.

        Raises:
            ModelLoadError: the file is missing or invalid.
        """
        file = path / "tokenizer.json"
        check_file(file, max_bytes=MAX_TEXT_BYTES)
        try:
            return cls(tokenizers.Tokenizer.from_file(str(file)))
        except Exception as error:  # the library raises bare Exception
            raise ModelLoadError(f"cannot read {file}: {error}") from error

    @property
    def vocab_size(self) -> int:
        return self._backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def longest_token_bytes(self) -> int | None:
        """The most bytes of text that one token can stand for, so that `n` bytes are at least
        `n / longest_token_bytes` tokens. None if a token may stand for any number of bytes, since
        parts of the text may be dropped, shortened, or merged into one unknown token."""
        backend = self._backend
        is_exact = (
            all(map(_keeps_length, _steps(backend.normalizer)))
            and all(map(_keeps_text, _steps(backend.pre_tokenizer)))
            and not any(
                token.lstrip or token.rstrip
                for token in backend.get_added_tokens_decoder().values()
            )
            and _knows_all_text(backend)
        )
        if not is_exact:
            return None
        # A piece is never shorter than the text it stands for: ▁ and Ġ have more bytes than a
        # space, and each unknown character is one token.
        pieces = list(backend.get_vocab())
        if backend.normalizer is not None:  # some added tokens are matched after it
            pieces += [
                backend.normalizer.normalize_str(token.content)
                for token in backend.get_added_tokens_decoder().values()
            ]
        return max(_MAX_CHAR_BYTES, *(len(piece.encode()) for piece in pieces))

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        max_tokens: int | None = None,
        param: str | None = None,
    ) -> list[int]:
        """
        Args:
            max_tokens: the end of the text is cut off beyond them, not special tokens after it;
                None: nothing is.
            param: the parameter that the text came from.

        Raises:
            InvalidRequestError: the text is not valid Unicode, or exceeds a limit of the
                tokenizer's regular expressions.
        """
        if max_tokens is None:
            return self._encodings([text], param, add_special_tokens=add_special_tokens)[0].ids
        [encoding] = self._encodings([text], param, add_special_tokens=False)
        num_special = self._backend.num_special_tokens_to_add(False) * add_special_tokens
        encoding.truncate(max(0, max_tokens - num_special))
        return self._backend.post_process(encoding, None, add_special_tokens).ids

    def first_text(self, text: str, num_tokens: int, *, param: str | None = None) -> str:
        """The text that its first so many tokens stand for; all of it if it has no more.

        Raises:
            InvalidRequestError: as `encode`.
        """
        [encoding] = self._encodings([text], param, add_special_tokens=False, has_offsets=True)
        offsets = encoding.offsets
        return text if len(offsets) <= num_tokens else text[: offsets[num_tokens - 1][1]]

    def encode_pair(
        self, first: str, second: str, *, max_tokens: int | None = None, param: str | None = None
    ) -> tuple[list[int], int]:
        """Two texts as the tokenizer joins them, and how many tokens are of its first type.

        Args:
            max_tokens: the end of the second text is cut off beyond them; None: nothing is.

        Raises:
            InvalidRequestError: as `encode`.
            PromptTooLongError: the first text fills `max_tokens`.
        """
        one, two = self._encodings([first, second], param, add_special_tokens=False)
        if max_tokens is not None:
            room = max_tokens - self._backend.num_special_tokens_to_add(True) - len(one)
            if room < 1:
                raise PromptTooLongError(
                    f"the first text has {len(one)} tokens, which leave no room for the second in "
                    f"{max_tokens}",
                    param=param,
                )
            two.truncate(room)
        both = self._backend.post_process(one, two, True)
        return both.ids, len(both.type_ids) - sum(each == 1 for each in both.type_ids)

    def _encodings(
        self,
        texts: list[str],
        param: str | None,
        *,
        add_special_tokens: bool,
        has_offsets: bool = False,
    ) -> list[tokenizers.Encoding]:
        # The batch call releases the GIL; `encode` holds it, and other threads would stop for
        # seconds with a text of 4 MB.
        try:
            is_long = max(map(len, texts)) >= self._panics_from_chars
            with PANICS_HIDDEN if is_long else _NOTHING:
                if has_offsets:
                    return self._backend.encode_batch(texts, add_special_tokens=add_special_tokens)
                return self._backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        except BaseException as error:
            message = next(filter(None, (_refusal(text, error) for text in texts)), None)
            if message is None:
                raise
            raise InvalidRequestError(message, param=param) from None

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Ids to text; invalid UTF-8 becomes U+FFFD, unknown ids become nothing."""
        if len(token_ids) < _MANY_TOKENS:
            return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        # The batch call releases the GIL, as in `encode`.
        [text] = self._backend.decode_batch(
            [list(token_ids)], skip_special_tokens=skip_special_tokens
        )
        return text

    def token_piece(self, token_id: int) -> str | None:
        """A token as the vocabulary writes it (`Ġthe`, `▁the`); None if there is none."""
        return self._backend.id_to_token(token_id)

    def token_text(self, token_id: int, *, is_first: bool = False) -> str:
        """The text of one token, special ones included.

        Args:
            is_first: it begins a text. SentencePiece's and WordPiece's tokens lose the space before
                them there.
        """
        anchor = None if is_first else self._anchor
        if anchor is not None:
            first_id, first = anchor
            text = self._backend.decode([first_id, token_id], skip_special_tokens=False)
            if text.startswith(first):
                return text[len(first) :]
        return self._backend.decode([token_id], skip_special_tokens=False)

    @cached_property
    def _anchor(self) -> tuple[int, str] | None:
        """A token that can stand before another one, and its text; None: a token's text does not
        depend on that."""
        if self.is_byte_level:
            return None
        others = self.special_token_ids | self.byte_of_token_id.keys()
        for token_id in range(self.vocab_size):
            text = self._backend.decode([token_id], skip_special_tokens=False)
            if text.isalnum() and token_id not in others:
                return token_id, text
        return None

    def token_bytes(self, token_id: int, *, is_first: bool = False) -> bytes:
        """The bytes a token stands for, even if they are not whole characters.

        Args:
            is_first: see `token_text`.
        """
        byte = self.byte_of_token_id.get(token_id)
        if byte is not None and not (is_first and byte == _SPACE):
            return bytes([byte])
        piece = self._backend.id_to_token(token_id) or ""
        text = self.token_text(token_id, is_first=is_first)
        if "\ufffd" in text and all(char in self._byte_of_char for char in piece):
            return bytes(self._byte_of_char[char] for char in piece)
        return text.encode()


class _Pieces(dict[int, str | bytes]):
    """Each token on its own, decoded on first use: text, or bytes if they are not whole
    characters."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> str | bytes:
        own = self._tokenizer.token_bytes(token_id)
        piece: str | bytes
        try:
            piece = own.decode()
        except UnicodeDecodeError:
            piece = own
        self[token_id] = piece
        return piece


def _refusal(text: str, error: BaseException) -> str | None:
    """What is wrong with a text that was not tokenised; None if the error has another cause."""
    if is_panic(error):
        reason = str(error)[:_MAX_REASON_CHARS]
        return f"the model's tokenizer cannot process this text ({reason})"
    if isinstance(error, TypeError):
        try:
            text.encode()
        except UnicodeEncodeError as cause:
            code, place = ord(text[cause.start]), cause.start
            return f"the text is not valid Unicode: U+{code:04X} at position {place} is half a pair"
    return None


def _repeats_groups(backend: tokenizers.Tokenizer) -> bool:
    """Whether a regular expression of the tokenizer repeats a group, so that it may try
    exponentially often in a text's length."""
    steps = [*_steps(backend.normalizer), *_steps(backend.pre_tokenizer)]
    patterns = [step["pattern"].get("Regex") for step in steps if "pattern" in step]
    return any(pattern and _REPEATED_GROUP.search(pattern) for pattern in patterns)


def _steps(component: Any) -> list[dict[str, Any]]:
    """A normaliser or pre-tokeniser as in tokenizer.json; a `Sequence` as its members."""
    return [] if component is None else list(_members(json.loads(component.__getstate__())))


def _members(step: dict[str, Any]) -> Iterator[dict[str, Any]]:
    members = step.get("normalizers", step.get("pretokenizers"))
    if members is None:
        yield step
    else:
        for member in members:
            yield from _members(member)


def _keeps_length(normaliser: dict[str, Any]) -> bool:
    """Whether normalising never makes a text shorter, in bytes."""
    if normaliser["type"] == "Replace":
        replaced = normaliser["pattern"].get("String")
        return replaced is not None and len(replaced.encode()) <= len(
            normaliser["content"].encode()
        )
    return normaliser["type"] in ("Prepend", "ByteLevel")


def _keeps_text(pre_tokeniser: dict[str, Any]) -> bool:
    """Whether pre-tokenising splits a text without dropping any of it."""
    if pre_tokeniser["type"] in ("Split", "Punctuation"):
        return bool(pre_tokeniser["behavior"] != "Removed")
    return pre_tokeniser["type"] in ("ByteLevel", "Metaspace", "Digits", "UnicodeScripts")


def _knows_all_text(backend: tokenizers.Tokenizer) -> bool:
    """Whether each character becomes at least one token, even if it is an unknown one."""
    model = backend.model
    if not isinstance(model, tokenizers.models.BPE):  # others map a whole word to one unknown token
        return False
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    has_piece = backend.get_vocab(with_added_tokens=False).__contains__
    steps = [*_steps(backend.normalizer), *_steps(backend.pre_tokenizer)]
    rewriting = [step["type"] for step in steps if step["type"] in _REWRITING]
    if rewriting[-1:] == ["ByteLevel"] and all(map(has_piece, byte_level_alphabet())):
        return True
    if model.byte_fallback and all(has_piece(f"<0x{byte:02X}>") for byte in range(256)):
        return True
    return model.unk_token is not None and has_piece(model.unk_token) and not model.fuse_unk


def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes (its `bytes_to_unicode`), inverted."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }


def _byte_fallback_ids(backend: tokenizers.Tokenizer) -> dict[int, int]:
    pieces = {byte: f"<0x{byte:02X}>" for byte in range(256)}
    ids = {byte: backend.token_to_id(piece) for byte, piece in pieces.items()}
    return {
        token_id: byte
        for byte, token_id in ids.items()
        # Without a byte-fallback decoder the piece is just that text.
        if token_id is not None and backend.decode([token_id]) != pieces[byte]
    }
