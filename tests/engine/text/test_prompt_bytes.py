"""How few tokens a text can have: what is refused by its length must never fit."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from penstock.engine.model_files.resolve import DEMO_MODEL_PATH
from penstock.engine.text import Tokenizer
from tests.support.tiers import tiered

from .conftest import byte_fallback, byte_level

_ALPHABET = pre_tokenizers.ByteLevel.alphabet()


def demo() -> Tokenizer:
    return Tokenizer.from_directory(DEMO_MODEL_PATH)


def changed(make: Callable[[], Tokenizer], **parts: Any) -> Tokenizer:
    """A tokenizer with other parts."""
    backend = make()._backend
    for name, part in parts.items():
        setattr(backend, name, part)
    return Tokenizer(backend)


def with_model(**changes: Any) -> Tokenizer:
    """`byte_fallback` with other settings of its model."""
    described = json.loads(byte_fallback()._backend.to_str())
    described["model"].update(changes)
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(described)))


def without_byte(pieces: list[str]) -> Tokenizer:
    vocab = {piece: index for index, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return Tokenizer(backend)


def with_added(
    make: Callable[[], Tokenizer], token: AddedToken, normalizer: Any = None
) -> Tokenizer:
    tokenizer = changed(make, **({} if normalizer is None else {"normalizer": normalizer}))
    tokenizer._backend.add_tokens([token])
    return Tokenizer(tokenizer._backend)


_SPACES = normalizers.Replace(" ", "▁")
EXACT = {
    "demo": demo,
    "byte level": byte_level,
    "byte fallback": byte_fallback,
    "unknown characters": lambda: with_model(byte_fallback=False, fuse_unk=False),
    "Llama 2's normaliser": lambda: changed(
        byte_fallback,
        normalizer=normalizers.Sequence([normalizers.Prepend("▁"), _SPACES]),
        pre_tokenizer=pre_tokenizers.Split("▁", "merged_with_next"),
    ),
    "an added token that is normalised": lambda: with_added(
        byte_fallback, AddedToken("h h h h h h h", normalized=True), _SPACES
    ),
    "single digits": lambda: changed(
        byte_level,
        pre_tokenizer=pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel()]
        ),
    ),
}
UNBOUNDED = {
    "NFC": lambda: changed(byte_level, normalizer=normalizers.NFC()),
    "strip": lambda: changed(byte_level, normalizer=normalizers.Strip()),
    "lower case": lambda: changed(byte_level, normalizer=normalizers.Lowercase()),
    "replace by less": lambda: changed(byte_level, normalizer=normalizers.Replace("abc", "a")),
    "replace a pattern": lambda: changed(
        byte_level, normalizer=normalizers.Replace(tokenizers.Regex(" +"), " ")
    ),
    "one of several": lambda: changed(
        byte_level, normalizer=normalizers.Sequence([normalizers.Prepend("x"), normalizers.NFKC()])
    ),
    "white space dropped": lambda: changed(
        byte_level,
        pre_tokenizer=pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()]
        ),
    ),
    "split and removed": lambda: changed(
        byte_fallback, pre_tokenizer=pre_tokenizers.Split(" ", "removed")
    ),
    "a token that strips on its right": lambda: with_added(
        byte_level, AddedToken("<sep>", rstrip=True)
    ),
    "a token that strips on its left": lambda: with_added(
        byte_level, AddedToken("<sep>", lstrip=True)
    ),
    "unknown ones fused": lambda: with_model(byte_fallback=False, fuse_unk=True),
    "unknown ones dropped": lambda: with_model(byte_fallback=False, unk_token=None),
    "a byte missing": lambda: without_byte(_ALPHABET[1:]),
    "written after its bytes": lambda: changed(
        byte_level,
        normalizer=normalizers.Sequence(
            [normalizers.ByteLevel(), normalizers.Replace("a", "漢漢")]
        ),
        pre_tokenizer=None,
    ),
    "words": lambda: Tokenizer(tokenizers.Tokenizer(models.WordLevel({"<unk>": 0}, "<unk>"))),
    "word pieces": lambda: Tokenizer(tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0}))),
    "unigrams": lambda: Tokenizer(tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0)], 0))),
}
_TEXTS = st.text(
    st.one_of(
        st.characters(exclude_categories=["Cs"]), st.sampled_from(list("helo ▁Ġ漢😀\u0301\u212a"))
    )
) | st.lists(
    st.sampled_from(
        ["<|end|>", "<s>", "h h h h h h h", "h▁h▁h▁h▁h▁h▁h", " hello", "\n\n", "\0", "é"]
    )
).map("".join)


@pytest.mark.parametrize("name", tiered(EXACT, ["demo", "byte fallback", "Llama 2's normaliser"]))
def test_no_token_stands_for_more_bytes(name: str) -> None:
    tokenizer = EXACT[name]()
    longest = tokenizer.longest_token_bytes
    assert longest is not None

    @settings(max_examples=300, deadline=None)
    @given(_TEXTS)
    def check(text: str) -> None:
        num_tokens = len(tokenizer.encode(text, add_special_tokens=False))
        assert num_tokens * longest >= len(text.encode())

    check()


@pytest.mark.parametrize("name", UNBOUNDED)
def test_a_tokenizer_that_may_shorten_text_says_so(name: str) -> None:
    assert UNBOUNDED[name]().longest_token_bytes is None


@pytest.mark.parametrize("make", tiered([demo, byte_level, byte_fallback], [byte_fallback]))
def test_ids_and_text_are_those_of_the_library(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()

    @settings(max_examples=200, deadline=None)
    @given(_TEXTS, st.booleans())
    def check(text: str, adds: bool) -> None:
        token_ids = tokenizer._backend.encode(text, add_special_tokens=adds).ids
        assert tokenizer.encode(text, add_special_tokens=adds) == token_ids
        many = token_ids * (4096 // max(1, len(token_ids)) + 1)  # decoded in the other way
        for skips in (False, True):
            expected = tokenizer._backend.decode(many, skip_special_tokens=skips)
            assert tokenizer.decode(many, skip_special_tokens=skips) == expected

    check()


@pytest.mark.parametrize("work", ["encode", "decode"])
def test_other_threads_go_on_beside_a_long_text(work: str) -> None:
    """A thread that is called back every millisecond. With Python's lock held it is not called at
    all until the text is done, however long that takes."""
    tokenizer = demo()
    long: Any = "a b" * 500_000 if work == "encode" else [70] * 2_000_000
    times: list[float] = []

    def run() -> None:
        times.append(time.perf_counter())
        getattr(tokenizer, work)(long)
        times.append(time.perf_counter())

    thread = threading.Thread(target=run)
    ticks = []
    thread.start()
    while thread.is_alive():
        ticks.append(time.perf_counter())
        time.sleep(0.001)
    start, end = times
    assert sum(start < tick < end for tick in ticks) > 10
