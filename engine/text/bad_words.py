"""Texts that an output must not have, as tokens: vLLM's `SamplingParams.bad_words`.

vLLM takes the spelling after a space only if it has as many tokens as the other one; here it is
always one of them, so that " the" is banned with "the" whatever the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from penstock.engine.errors import InvalidRequestError
from penstock.engine.text.tokenizer import Tokenizer


def bad_words_token_ids(tokenizer: Tokenizer, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """The words' tokens, each as the beginning of a text and after a space.

    Raises:
        InvalidRequestError: a word is empty, or the tokenizer makes nothing of it.
    """
    return tuple(dict.fromkeys(_spellings(tokenizer, words)))


def _spellings(tokenizer: Tokenizer, words: Iterable[str]) -> Iterator[tuple[int, ...]]:
    for index, word in enumerate(words):
        bare = word.lstrip()
        plain, spaced = _encoded(tokenizer, bare), _encoded(tokenizer, f" {bare}")
        if not plain:
            raise InvalidRequestError(f"bad_words[{index}] has no tokens", param="bad_words")
        yield plain
        if spaced[-len(plain) :] != plain:  # the space is a token of its own
            yield spaced


def _encoded(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False, param="bad_words"))
