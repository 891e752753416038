"""A model's tokenizer: `tokenizers` behind the few calls serving needs.

Knows nothing of chat messages (`chat_template`) or of streaming (`output_text`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tokenizers
import tokenizers.decoders

from penstock.engine.errors import ModelLoadError


class Tokenizer:
    """Text ↔ token ids. Safe to share between threads: it holds no state of a call."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        # A tokenizer.json may carry padding and truncation of its training run.
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self._byte_of_char = _byte_level_alphabet()
        self.special_token_ids = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )
        # At these, text is split before anything else looks at it: what stands on either side is
        # tokenised as if the other were not there.
        self.boundary_tokens = {
            token_id: token.content
            for token_id, token in backend.get_added_tokens_decoder().items()
            if not (token.lstrip or token.single_word or token.normalized)
        }
        # GPT-2's kind: a token stands for the same bytes wherever it is.
        self.is_byte_level = isinstance(backend.decoder, tokenizers.decoders.ByteLevel)
        self.pieces = _Pieces(self)
        # SentencePiece's byte fallback: ids that stand for one byte each, as <0xNN>.
        self.byte_of_token_id = _byte_fallback_ids(backend)

    @classmethod
    def from_directory(cls, path: Path) -> Tokenizer:
        """Read `tokenizer.json`.

        Raises:
            ModelLoadError: it is missing or not a tokenizer.
        """
        file = path / "tokenizer.json"
        if not file.is_file():
            raise ModelLoadError(f"{path} has no tokenizer.json")
        try:
            return cls(tokenizers.Tokenizer.from_file(str(file)))
        except Exception as error:  # the library raises bare Exception
            raise ModelLoadError(f"cannot read {file}: {error}") from error

    @property
    def vocab_size(self) -> int:
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Ids to text; bytes that are no UTF-8 become U+FFFD, unknown ids nothing."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_piece(self, token_id: int) -> str | None:
        """A token as the vocabulary writes it (`Ġthe`, `▁the`); None if there is none."""
        return self._backend.id_to_token(token_id)

    def token_text(self, token_id: int) -> str:
        """One token on its own, special ones included."""
        return self._backend.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for, also where they are no whole character."""
        byte = self.byte_of_token_id.get(token_id)
        if byte is not None:
            return bytes([byte])
        piece = self._backend.id_to_token(token_id) or ""
        text = self.token_text(token_id)
        if "\ufffd" in text and all(char in self._byte_of_char for char in piece):
            return bytes(self._byte_of_char[char] for char in piece)
        return text.encode()


class _Pieces(dict[int, str | bytes]):
    """What tokens stand for on their own, made when first asked for: text, or bytes where they
    are no whole characters."""

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


def _byte_level_alphabet() -> dict[str, int]:
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
