"""Words that an output must not have, as tokens."""

from __future__ import annotations

import pytest

from penstock.engine.errors import InvalidRequestError
from penstock.engine.text import Tokenizer
from penstock.engine.text.bad_words import bad_words_token_ids


class Dropping(Tokenizer):
    """As one whose normalizer drops some characters."""

    def __init__(self) -> None: ...

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        max_tokens: int | None = None,
        param: str | None = None,
    ) -> list[int]:
        return [ord(each) for each in text.replace("\u200b", "")]


def test_a_word_is_banned_with_and_without_a_space() -> None:
    assert bad_words_token_ids(Dropping(), ["a", " b\u200b"]) == ((97,), (98,))


@pytest.mark.parametrize("word", ["", "\u200b"])
def test_a_word_without_tokens_is_refused(word: str) -> None:
    """An engine would fail on it, and take everybody's streams with it."""
    with pytest.raises(InvalidRequestError, match=r"bad_words\[1\] has no tokens") as refused:
        bad_words_token_ids(Dropping(), ["a", word])
    assert refused.value.param == "bad_words"
