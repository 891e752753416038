"""A check of a tokenizer that was made for a GGUF file, against the whole class of its faults: each
token is decoded and encoded, so that ids, spelling, splitting and merging are the file's.

Left out are tokens without a text of their own (bytes, unused ones, parts of characters). Some
others are reached in another way: their text becomes tokens that together are this text. They are
counted.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import tokenizers
from tokenizers import decoders, normalizers

from penstock.engine.config_fields import shown
from penstock.engine.errors import ModelLoadError
from penstock.engine.gguf.vocabulary import TOKENS, TokenType, Vocabulary, id_key
from penstock.engine.native_panics import PANICS_HIDDEN, is_panic
from penstock.engine.text.tokenizer import byte_level_alphabet

_LOG = logging.getLogger(__name__)
# Encoding takes most of the time, on two cores 0.25 s for 150,000 tokens. Tokens are taken from the
# whole vocabulary evenly, so those that are left out where time is over are like the rest.
_MAX_S = 0.3
_ENCODED_AT_ONCE = 500
_DECODED_AT_ONCE = 4096
# Normalizers that are meant to change a text.
_CHANGING = (normalizers.NFC, normalizers.BertNormalizer, normalizers.Precompiled)
_CONTINUES, _SPACE = "##", "▁"
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
    for first in range(0, len(ids), _DECODED_AT_ONCE):
        some = ids[first : first + _DECODED_AT_ONCE]
        if not _is_decoded(backend, texts, anchor, some):
            wrong = next((each for each in some if not _is_decoded(backend, texts, anchor, [each])),
                         some[0])  # fmt: skip
            found = backend.decode([wrong], skip_special_tokens=False)
            raise ModelLoadError(
                f"{TOKENS}: token {wrong} is {shown(texts.decoded[wrong])}, but decoded it is "
                f"{shown(found)}"
            )


def _is_word(text: str | bytes) -> bool:
    return isinstance(text, str) and text.isalnum()


def _is_decoded(
    backend: tokenizers.Tokenizer, texts: _Texts, anchor: int | None, ids: Sequence[int]
) -> bool:
    ids = ids if anchor is None else [anchor, *ids]
    parts = (texts.decoded[number] for number in ids)
    expected = b"".join(each if isinstance(each, bytes) else each.encode() for each in parts)
    found = backend.decode(ids, skip_special_tokens=False)
    return _same(found, expected.decode(errors="replace"), texts)


def _same(found: str, expected: str, texts: _Texts) -> bool:
    if texts.has_spaces:
        return found.removeprefix(" ") == expected.removeprefix(" ")
    return "".join(found.split()) == "".join(expected.split())


def _check_encoding(
    backend: tokenizers.Tokenizer, vocabulary: Vocabulary, texts: _Texts, *, until: float
) -> tuple[int, int]:
    """How many tokens were encoded, and how many of them became others of the same text."""
    added = {number: vocabulary.tokens[number] for number in vocabulary.added_ids}
    rest = {
        number: text
        for number, text in texts.encoded.items()
        if text and number not in vocabulary.added
    }
    if isinstance(backend.normalizer, normalizers.Sequence):
        backend.normalizer = backend.normalizer[1]  # without the space that begins a text
    num_checked = num_others = 0
    chunks = (*_chunks(added, len(added)), *_chunks(rest, _ENCODED_AT_ONCE * _num_cpus()))
    for order, some in enumerate(chunks):
        if order > 1 and time.perf_counter() > until:
            break
        others = [
            (number, ids)
            for number, ids in zip(some, _encoded(backend, vocabulary, some), strict=True)
            if ids != [number]
        ]
        num_checked, num_others = num_checked + len(some), num_others + len(others)
        for number, ids in others:
            _check_other(backend, vocabulary, texts, some[number], number, ids)
    return num_checked, num_others


def _chunks(texts: dict[int, str], size: int) -> Iterator[dict[int, str]]:
    """Of about this size, each from the whole vocabulary evenly."""
    num_chunks = -(-len(texts) // max(1, size))
    items = [*texts.items()]
    for first in range(num_chunks):
        yield dict(items[first::num_chunks])


def _encoded(
    backend: tokenizers.Tokenizer, vocabulary: Vocabulary, some: dict[int, str]
) -> list[list[int]]:
    """The ids of each text. Many texts with a token between them are encoded faster than one by
    one."""
    between = next(
        (number for number in vocabulary.added_ids
         if number not in some and vocabulary.types[number] == TokenType.CONTROL), None,
    )  # fmt: skip
    texts = [*some.values()]
    if between is None:
        return [each.ids for each in backend.encode_batch_fast(texts, add_special_tokens=False)]
    mark = vocabulary.tokens[between]
    parts = [
        mark.join(texts[first : first + _ENCODED_AT_ONCE])
        for first in range(0, len(texts), _ENCODED_AT_ONCE)
    ]
    found = list[list[int]]()
    for part in backend.encode_batch_fast(parts, add_special_tokens=False):
        found.append([])
        for token_id in part.ids:
            if token_id == between:
                found.append([])
            else:
                found[-1].append(token_id)
    if len(found) == len(texts):
        return found
    return [each.ids for each in backend.encode_batch_fast(texts, add_special_tokens=False)]


def _num_cpus() -> int:
    return len(os.sched_getaffinity(0))


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
