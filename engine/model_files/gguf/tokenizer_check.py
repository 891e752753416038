"""A check of a tokenizer that was made for a GGUF file, against the whole class of its faults: each
token is decoded and encoded, so that ids, spelling, splitting and merging are the file's.

Left out are tokens without a text of their own (bytes, unused ones, parts of characters). Some
others are reached in another way: their text becomes tokens that together are this text. They are
counted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import tokenizers
from tokenizers import decoders, normalizers

from penstock.engine.errors import ModelLoadError
from penstock.engine.model_files.config_fields import shown
from penstock.engine.model_files.gguf.vocabulary import TOKENS, TokenType, Vocabulary, id_key
from penstock.engine.process.native_panics import PANICS_HIDDEN, is_panic
from penstock.engine.text.tokenizer import byte_level_alphabet

_LOG = logging.getLogger(__name__)
# Encoding takes most of the time. On two idle cores the whole check of Llama 3's 128,000 tokens
# takes 0.28 s, that of Qwen's 152,000, of which more are not ASCII, 0.5 s: the library is not
# faster. Tokens are taken from the whole vocabulary evenly, so those that time does not suffice for
# are like the rest.
_MAX_S = 0.3
_ENCODED_AT_ONCE = 50  # in one text, of which a call has many
_TEXTS_AT_ONCE = 200
_DECODED_AT_ONCE = 4096
# Normalizers that are meant to change a text.
_CHANGING = (normalizers.NFC, normalizers.BertNormalizer, normalizers.Precompiled)
_CONTINUES, _SPACE, _SPACE_OF_BYTES = "##", "▁", "Ġ"
_BEYOND = 0x100000  # no characters: for those that spell no byte
_END = "\U0010ffff"


_Result = TypeVar("_Result")


class _Texts(NamedTuple):
    """The texts of normal and user-defined tokens, by id.

    Attributes:
        decoded: what the token is inside of a text; bytes are a part of a character.
        encoded: the text that becomes the token, where there is one.
        has_spaces: decoding keeps the spaces of a text.
    """

    decoded: dict[int, str | bytes]
    encoded: dict[int, str]
    has_spaces: bool


def loaded(text: str) -> tokenizers.Tokenizer:
    """Args:
        text: a `tokenizer.json`.

    Raises:
        ModelLoadError: the library refuses it.
    """
    return _guarded(lambda: tokenizers.Tokenizer.from_str(text))


def check(backend: tokenizers.Tokenizer, vocabulary: Vocabulary) -> None:
    """Raises:
    ModelLoadError: with the first token that is not the file's.
    """
    _guarded(lambda: _check(backend, vocabulary))


def _guarded(call: Callable[[], _Result]) -> _Result:
    try:
        with PANICS_HIDDEN:
            return call()
    except ModelLoadError:
        raise
    except BaseException as error:
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        raise ModelLoadError(f"the keys tokenizer.ggml.… make no tokenizer: {error}") from None


def _check(backend: tokenizers.Tokenizer, vocabulary: Vocabulary) -> None:
    start = time.perf_counter()
    num_tokens, found = len(vocabulary.tokens), backend.get_vocab_size(with_added_tokens=True)
    if found != num_tokens:
        raise ModelLoadError(f"{TOKENS} has {num_tokens:,} tokens, and {found:,} were made of it")
    for name, token_id in vocabulary.named_ids():
        text = vocabulary.tokens[token_id]
        if backend.id_to_token(token_id) != text or backend.token_to_id(text) != token_id:
            raise ModelLoadError(f"{id_key(name)}: {token_id} is not {shown(text)}")
    texts = _texts(backend, vocabulary)
    _check_decoding(backend, texts)
    num_checked, num_others = _check_encoding(backend, vocabulary, texts, until=start + _MAX_S)
    _LOG.debug(
        "tokenizer of %d tokens: %d have a text, %d were encoded, %d became others of the same "
        "text; %.2f s",
        num_tokens, len(texts.decoded), num_checked, num_others, time.perf_counter() - start,
    )  # fmt: skip


def _texts(backend: tokenizers.Tokenizer, vocabulary: Vocabulary) -> _Texts:
    with_text = (TokenType.NORMAL, TokenType.USER_DEFINED)
    chosen = {
        number: vocabulary.tokens[number]
        for number, each in enumerate(vocabulary.types)
        if each in with_text
    }
    match backend.decoder:
        case decoders.ByteLevel():
            decoded = _texts_of_bytes(chosen)
            encoded = {number: text for number, text in decoded.items() if isinstance(text, str)}
            return _Texts(decoded, encoded, has_spaces=True)
        case decoders.WordPiece():
            words = {n: text for n, text in chosen.items() if not text.startswith(_CONTINUES)}
            parts = {number: text.removeprefix(_CONTINUES) for number, text in chosen.items()}
            return _Texts(dict(parts), words, has_spaces=False)
    spaced = {number: text.replace(_SPACE, " ") for number, text in chosen.items()}
    if not isinstance(backend.decoder, decoders.Metaspace):
        return _Texts(dict(spaced), spaced, has_spaces=True)
    words = {n: text[1:] for n, text in spaced.items() if chosen[n].startswith(_SPACE)}
    return _Texts(dict(spaced), words, has_spaces=False)


def _texts_of_bytes(chosen: dict[int, str]) -> dict[int, str | bytes]:
    table = {code: chr(_BEYOND + code) for code in range(256)} | {ord(_END): ""}
    table |= {ord(char): chr(byte) for char, byte in byte_level_alphabet().items()}
    texts = dict[int, str | bytes]()
    for number, token in chosen.items():
        plain = token.replace(_SPACE_OF_BYTES, " ")
        if plain.isascii() and plain.isprintable() and " " not in token:  # most are: it is faster
            texts[number] = plain
            continue
        text: str | bytes
        try:
            text = token.translate(table).encode("latin-1")
            text = text.decode()
        except UnicodeEncodeError:  # no bytes: a text as it is, which words never become
            text = token
        except UnicodeDecodeError:
            pass
        texts[number] = text
    return texts


def _check_decoding(backend: tokenizers.Tokenizer, texts: _Texts) -> None:
    ids = [*texts.decoded]
    # What begins a text may lose a space, so another token is before those that are looked at.
    anchor = next((number for number in ids if _is_word(texts.decoded[number])), None)
    before = [] if anchor is None else [anchor]

    def wrong_of(chunks: Sequence[Sequence[int]]) -> Iterator[tuple[Sequence[int], str]]:
        """Those whose text is another one, with this text."""
        with_anchor = [[*before, *chunk] for chunk in chunks]
        found = backend.decode_batch(with_anchor, skip_special_tokens=False)
        for chunk, numbers, text in zip(chunks, with_anchor, found, strict=True):
            if not _same(text, _joined(texts, numbers), texts):
                yield chunk, text

    chunks = [ids[at : at + _DECODED_AT_ONCE] for at in range(0, len(ids), _DECODED_AT_ONCE)]
    for chunk, _ in wrong_of(chunks):
        [wrong], _ = next(wrong_of([[each] for each in chunk]), (chunk[:1], ""))
        found = backend.decode([wrong], skip_special_tokens=False)
        raise ModelLoadError(
            f"{TOKENS}: token {wrong} is {shown(texts.decoded[wrong])}, but decoded it is "
            f"{shown(found)}"
        )


def _is_word(text: str | bytes) -> bool:
    return isinstance(text, str) and text.isalnum()


def _joined(texts: _Texts, ids: Sequence[int]) -> str:
    parts = (texts.decoded[number] for number in ids)
    joined = b"".join(each if isinstance(each, bytes) else each.encode() for each in parts)
    return joined.decode(errors="replace")


def _same(found: str, expected: str, texts: _Texts) -> bool:
    if texts.has_spaces:
        return found.removeprefix(" ") == expected.removeprefix(" ")
    return "".join(found.split()) == "".join(expected.split())


def _check_encoding(
    backend: tokenizers.Tokenizer, vocabulary: Vocabulary, texts: _Texts, *, until: float
) -> tuple[int, int]:
    """How many tokens were encoded, and how many of them became others of the same text."""
    added = [(number, vocabulary.tokens[number]) for number in vocabulary.added_ids]
    rest = [
        (number, text)
        for number, text in texts.encoded.items()
        if text and number not in vocabulary.added
    ]
    if isinstance(backend.normalizer, normalizers.Sequence):
        backend.normalizer = backend.normalizer[1]  # without the space that begins a text
    num_checked = num_others = 0
    num_chunks = -(-len(rest) // (_ENCODED_AT_ONCE * _TEXTS_AT_ONCE))
    chunks = [added, *(rest[first::num_chunks] for first in range(num_chunks))]
    for order, chunk in enumerate(chunks):
        if order > 1 and time.perf_counter() > until:
            break
        num_checked += len(chunk)
        for number, text, ids in _others(backend, vocabulary, chunk):
            num_others += 1
            _check_other(backend, vocabulary, texts, text, number, ids)
    return num_checked, num_others


def _others(
    backend: tokenizers.Tokenizer, vocabulary: Vocabulary, chunk: Sequence[tuple[int, str]]
) -> Iterator[tuple[int, str, list[int]]]:
    """Tokens that become others when their texts are encoded, with the ids of these. Many texts
    with a token between them are encoded faster than one by one."""
    numbers = {number for number, _ in chunk}
    between = next(
        (number for number in vocabulary.added_ids
         if number not in numbers and vocabulary.types[number] == TokenType.CONTROL), None,
    )  # fmt: skip
    mark, size = "", 1
    if between is not None:
        mark, size = vocabulary.tokens[between], _ENCODED_AT_ONCE
    parts = [chunk[at : at + size] for at in range(0, len(chunk), size)]
    joined = [mark.join(text for _, text in part) for part in parts]
    found = backend.encode_batch_fast(joined, add_special_tokens=False)
    for part, encoding in zip(parts, found, strict=True):
        ids = encoding.ids
        expected = [between] * (2 * len(part) - 1)
        expected[::2] = [number for number, _ in part]
        if ids == expected:
            continue
        ends = [*(at for at, each in enumerate(ids) if each == between), len(ids)]
        if len(ends) != len(part):
            yield from _others_alone(backend, part)
            continue
        start = 0
        for (number, text), end in zip(part, ends, strict=True):
            if end != start + 1 or ids[start] != number:
                yield number, text, ids[start:end]
            start = end + 1


def _others_alone(
    backend: tokenizers.Tokenizer, part: Sequence[tuple[int, str]]
) -> Iterator[tuple[int, str, list[int]]]:
    texts = [text for _, text in part]
    found = backend.encode_batch_fast(texts, add_special_tokens=False)
    for (number, text), encoding in zip(part, found, strict=True):
        if encoding.ids != [number]:
            yield number, text, encoding.ids


def _check_other(
    backend: tokenizers.Tokenizer,
    vocabulary: Vocabulary,
    texts: _Texts,
    text: str,
    token_id: int,
    ids: list[int],
) -> None:
    """Whether ids that are not the token's are of the same text.

    Raises:
        ModelLoadError: they are not.
    """
    if token_id not in vocabulary.added:
        # It has characters that the vocabulary lacks, or an added token is within it: DeepSeek's
        # have `õ`, which is in words of Portuguese, too.
        if not vocabulary.added.isdisjoint(ids):
            return
        found = backend.decode(ids, skip_special_tokens=False)
        normalized = text
        if isinstance(backend.normalizer, _CHANGING):
            normalized = backend.normalizer.normalize_str(text)
        if any(_same(found, each, texts) for each in (text, normalized)):
            return
    raise ModelLoadError(
        f"{TOKENS}: token {token_id}, {shown(text)}, becomes {shown(ids)} when it is encoded"
    )
