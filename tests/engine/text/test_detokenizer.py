"""Streaming text: whole characters, each once, and stop strings wherever tokens cut them."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.request import SamplingParams
from penstock.engine.text import OutputText, Tokenizer
from penstock.engine.text.detokenizer import _DecodedWindow, new_detokenizer

from .conftest import byte_fallback, byte_level

_TOKENIZERS = {"bytes": byte_level(), "fallback": byte_fallback()}


def stream(
    tokenizer: Tokenizer, ids: list[int], *, chunk: int = 1, **params: object
) -> tuple[list[str], int, str | None]:
    """Push ids in chunks; the deltas, how many ids counted, the stop string."""
    settled = SamplingParams(max_tokens=10_000, **params)  # type: ignore[arg-type]
    output = OutputText(tokenizer, settled)
    deltas, num_tokens = [], 0
    for start in range(0, len(ids), chunk):
        delta = output.push(ids[start : start + chunk])
        deltas.append(delta.text)
        num_tokens += delta.num_tokens
        if delta.stop is not None:
            return deltas, num_tokens, delta.stop
    last = output.finish()
    return [*deltas, last.text], num_tokens, last.stop


def test_no_delta_holds_half_a_character(tokenizer: Tokenizer) -> None:
    text = "héllo 漢字 😀👍🏽 " * 10 + "naïve café"
    ids = tokenizer.encode(text, add_special_tokens=False)
    for chunk in (1, 2, 5):
        deltas, num_tokens, _ = stream(tokenizer, ids, chunk=chunk)
        assert "".join(deltas) == text == tokenizer.decode(ids)
        assert all("\ufffd" not in delta for delta in deltas)
        assert num_tokens == len(ids)


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=80), st.sampled_from(sorted(_TOKENIZERS)), st.integers(1, 7))
def test_any_text_streams_to_itself(text: str, kind: str, chunk: int) -> None:
    tokenizer = _TOKENIZERS[kind]
    ids = tokenizer.encode(text, add_special_tokens=False)
    deltas, _, _ = stream(tokenizer, ids, chunk=chunk)
    assert "".join(deltas) == tokenizer.decode(ids)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 329), max_size=120))
def test_any_bytes_stream_to_their_decoding(ids: list[int]) -> None:
    """A model may also emit bytes that are no UTF-8 at all, for as long as it likes."""
    tokenizer = _TOKENIZERS["bytes"]
    deltas, _, _ = stream(tokenizer, ids)
    assert "".join(deltas) == tokenizer.decode(ids)


def test_a_character_is_shown_as_soon_as_it_is_whole(bytes_tokenizer: Tokenizer) -> None:
    ids = bytes_tokenizer.encode("a€b", add_special_tokens=False)
    deltas, _, _ = stream(bytes_tokenizer, ids)
    assert "".join(deltas[: len(ids)]) == "a€b", "nothing is left for the end"


def test_half_a_character_at_the_end_is_not_swallowed(bytes_tokenizer: Tokenizer) -> None:
    ids = bytes_tokenizer.encode("ok 🀄", add_special_tokens=False)[:-1]
    deltas, _, _ = stream(bytes_tokenizer, ids)
    assert "".join(deltas) == bytes_tokenizer.decode(ids)
    assert deltas[-1] == "\ufffd"


def test_special_tokens_show_only_when_asked_for(bytes_tokenizer: Tokenizer) -> None:
    (end,) = bytes_tokenizer.encode("<|end|>", add_special_tokens=False)
    ids = [*bytes_tokenizer.encode("hi", add_special_tokens=False), end]
    assert "".join(stream(bytes_tokenizer, ids)[0]) == "hi"
    assert "".join(stream(bytes_tokenizer, ids, skip_special_tokens=False)[0]) == "hi<|end|>"


def test_a_stop_string_over_several_tokens_never_shows(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello world. the end of it", add_special_tokens=False)
    for chunk in (1, 3, 100):
        deltas, num_tokens, stop = stream(tokenizer, ids, chunk=chunk, stop=("d. th",))
        assert "".join(deltas) == "hello worl"
        assert stop == "d. th"
        assert tokenizer.decode(ids[:num_tokens]).startswith("hello world. th")
        assert "d. th" not in tokenizer.decode(ids[: num_tokens - 1])


def test_the_stop_string_may_be_kept(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello world", add_special_tokens=False)
    deltas, _, _ = stream(tokenizer, ids, stop=("lo w",), include_stop_str_in_output=True)
    assert "".join(deltas) == "hello w"


def test_what_only_looked_like_a_stop_string_is_shown(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("abab abac", add_special_tokens=False)
    deltas, _, stop = stream(tokenizer, ids, stop=("abad", "acx"))
    assert "".join(deltas) == "abab abac"
    assert stop is None


def test_stop_strings_wait_for_min_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a.b.c.d", add_special_tokens=False)
    deltas, num_tokens, stop = stream(tokenizer, ids, stop=(".",), min_tokens=len(ids) - 2)
    assert stop == "."
    assert num_tokens > len(ids) - 2
    assert "".join(deltas).startswith("a.b")


def test_of_two_stop_strings_the_first_to_end_wins(bytes_tokenizer: Tokenizer) -> None:
    ids = bytes_tokenizer.encode("xabcd", add_special_tokens=False)
    assert "".join(stream(bytes_tokenizer, ids, chunk=99, stop=("abcd", "bc"))[0]) == "xa"


@settings(max_examples=200, deadline=None)
@given(st.text("ab", max_size=40), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_stop_strings_cut_where_a_plain_search_would(text: str, stops: list[str]) -> None:
    tokenizer = _TOKENIZERS["bytes"]
    ids = [tokenizer.encode(char, add_special_tokens=False)[0] for char in text]
    deltas, _, _ = stream(tokenizer, ids, stop=tuple(stops))
    expected = text
    for end in range(1, len(text) + 1):  # one character at a time, as the tokens come
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            expected = text[: end - len(max(hits, key=len))]
            break
    assert "".join(deltas) == expected


def test_a_long_stream_is_linear() -> None:
    rng = random.Random(0)
    detokenizer = new_detokenizer(_TOKENIZERS["fallback"], skip_special_tokens=True)
    assert isinstance(detokenizer, _DecodedWindow)
    for _ in range(5_000):
        detokenizer.push(rng.randrange(3, 280))
        assert len(detokenizer._window) <= 16


def test_a_continuation_keeps_the_space_before_its_first_word(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("hello", add_special_tokens=False)
    whole = tokenizer.encode("hello he said", add_special_tokens=False)
    assert whole[: len(prompt)] == prompt
    params = SamplingParams(max_tokens=100)
    output = OutputText(tokenizer, params, context=prompt)
    text = "".join(output.push([token]).text for token in whole[len(prompt) :])
    assert text + output.finish().text == " he said"
