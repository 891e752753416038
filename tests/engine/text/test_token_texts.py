"""The texts and bytes of tokens, joined, are the text, whatever kind of tokenizer made them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from penstock.engine.model_files.resolve import DEMO_MODEL_PATH
from penstock.engine.request import SamplingParams, TokenLogprobs
from penstock.engine.text import OutputText, Tokenizer
from penstock.gateway.api.shared.logprobs import TokenLists, TokenObjects

from .conftest import byte_fallback, byte_level

_LETTERS = "abcdefghijklmnopqrstuvwxyzHI,."
_WORDS = ("▁it", "▁is", "▁I", "it", "is", "▁▁", "▁▁▁", "é")


def _sentence_piece(decoder: decoders.Decoder, normalizer: normalizers.Normalizer) -> Tokenizer:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *_LETTERS, *_WORDS]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = [("i", "t"), ("i", "s"), ("▁", "it"), ("▁", "is"), ("▁", "I"), ("▁", "▁"), ("▁▁", "▁")]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizer
    backend.decoder = decoder
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(backend)


def llama_2() -> Tokenizer:
    """As Llama 2, Mistral and Phi 3: a space is put before a text, and taken away again."""
    return _sentence_piece(
        decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        ),
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
    )


def gemma() -> Tokenizer:
    return _sentence_piece(
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
        normalizers.Replace(" ", "▁"),
    )


def unigram() -> Tokenizer:
    """As T5."""
    pieces = [("<unk>", 0.0), *((each, -3.0) for each in ("▁", *_LETTERS)), ("▁it", -1.0)]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    return Tokenizer(backend)


def word_piece() -> Tokenizer:
    """As BERT."""
    pieces = ["[UNK]", *_LETTERS, *(f"##{letter}" for letter in _LETTERS), "it", "is", "##is"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return Tokenizer(backend)


def real() -> Tokenizer:
    return Tokenizer.from_directory(DEMO_MODEL_PATH)


KINDS = {
    make.__name__: make()
    for make in (byte_level, byte_fallback, llama_2, gemma, unigram, word_piece, real)
}
_TEXTS = st.text(st.sampled_from("it is.I, \n▁é漢😀") | st.characters(codec="utf-8"), max_size=30)


def entries(token_ids: Sequence[int]) -> list[TokenLogprobs]:
    return [
        TokenLogprobs(token_id=each, logprob=-1.0, rank=1, top=((each, -1.0),))
        for each in token_ids
    ]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(text=_TEXTS, size=st.integers(1, 5))
def test_bytes_joined_are_the_text(kind: str, text: str, size: int) -> None:
    tokenizer = KINDS[kind]
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    expected = tokenizer.decode(token_ids, skip_special_tokens=False)
    made = TokenObjects(tokenizer, begins=True)
    objects = [
        each
        for start in range(0, len(token_ids), size)
        for each in made.of(entries(token_ids[start : start + size]))
    ]
    assert b"".join(bytes(each["bytes"]) for each in objects) == expected.encode()
    for each in objects:
        [candidate] = each["top_logprobs"]
        assert (candidate["token"], candidate["bytes"]) == (each["token"], each["bytes"])
        if "\ufffd" not in each["token"]:
            assert each["token"].encode() == bytes(each["bytes"])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=50, deadline=None)
@given(first=st.sampled_from(["it", "is it", "I"]), text=_TEXTS)
def test_within_a_text_nothing_is_first(kind: str, first: str, text: str) -> None:
    """Where an output continues its prompt."""
    tokenizer = KINDS[kind]
    context = tokenizer.encode(first, add_special_tokens=False)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.decode([*context, *token_ids], skip_special_tokens=False)
    rest = whole[len(tokenizer.decode(context, skip_special_tokens=False)) :]
    made = TokenObjects(tokenizer, begins=False).of(entries(token_ids))
    assert b"".join(bytes(each["bytes"]) for each in made) == rest.encode()
    lists = TokenLists(tokenizer, num_top=0, skip_special_tokens=True, context=context)
    assert lists.add(entries(token_ids))["tokens"] == [each["token"] for each in made]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [1, 9])
def test_spaces_between_special_tokens(kind: str, chunk: int) -> None:
    """Those that the tokenizer puts there; none of the text is lost."""
    backend = tokenizers.Tokenizer.from_str(KINDS[kind]._backend.to_str())
    backend.add_special_tokens(["<A>", "<B>"])
    tokenizer = Tokenizer(backend)
    token_ids = tokenizer.encode("it<A><B><B>is it<A>", add_special_tokens=False)
    texts = []
    for spaces in (True, False):
        params = SamplingParams(skip_special_tokens=False, spaces_between_special_tokens=spaces)
        output = OutputText(tokenizer, params)
        parts = [
            output.push(token_ids[start : start + chunk]).text
            for start in range(0, len(token_ids), chunk)
        ]
        texts.append("".join([*parts, output.finish().text]))
    assert texts[0] == tokenizer.decode(token_ids, skip_special_tokens=False)
    assert "<A><B><B>" in texts[1]
    assert texts[1] == texts[0].replace("> <", "><")
    if kind == "word_piece":
        assert texts[0] == "it <A> <B> <B> is it <A>"


@pytest.mark.parametrize("kind", ["llama_2", "byte_fallback"])
def test_tokens_keep_their_space(kind: str) -> None:
    tokenizer = KINDS[kind]
    word, end = ("▁it", "</s>") if kind == "llama_2" else ("▁he", "</s>")
    ids = [tokenizer._backend.token_to_id(piece) for piece in (word, word, end)]
    texts = [each["token"] for each in TokenObjects(tokenizer, begins=True).of(entries(ids))]
    assert texts == [word[1:], word.replace("▁", " "), "</s>"]
    # A special token before it is not shown.
    texts = [each["token"] for each in TokenObjects(tokenizer, begins=True).of(entries(ids[::-1]))]
    assert texts == ["</s>", word[1:], word.replace("▁", " ")]
