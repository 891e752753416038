"""Prompts of a wanted length in tokens, drawn from a seed: token ids, or words.

Without a tokenizer a word counts as one token: the words are so common that most tokenizers hold
each, with the space before it, as one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer

from penstock.engine.errors import ConfigError
from penstock.load.client.records import Prompt

DEFAULT_VOCAB_SIZE = 1000  # smaller than any vocabulary in use
_MAX_ROUNDS = 4

_COMMON_WORDS = """
the of and to in is that for it as was with be by on not he his but at are this have from or had
an they which one you were all her she there would their we him has when who will no more
if out so up said what its about than into them can only other time new some could these two may
first then do any like my now over such our man me even most made after also did many off before
must well back through years much where your way down should because long each just state those
people too little good world make very year still see work life being under day house here never
between both came war place great right old part take hand high school however next water
"""
WORDS = tuple(_COMMON_WORDS.split())


class PromptMaker(Protocol):
    """Draws prompts: the datasets' only source of text."""

    def draw(self, rng: random.Random, num_tokens: int) -> Prompt: ...


@dataclass(frozen=True, slots=True)
class TokenIds:
    """Prompts of exactly so many token ids."""

    ids: Sequence[int] = range(DEFAULT_VOCAB_SIZE)  # those that may be drawn

    def draw(self, rng: random.Random, num_tokens: int) -> tuple[int, ...]:
        return tuple(rng.choices(self.ids, k=num_tokens))


@dataclass(frozen=True, slots=True)
class Words:
    """Prompts of common words.

    Attributes:
        tokenizer: trims to the length wanted, where its tokens allow that; None: a word is a
            token.
    """

    tokenizer: Tokenizer | None = None

    def draw(self, rng: random.Random, num_tokens: int) -> str:
        text = " ".join(rng.choices(WORDS, k=num_tokens))  # a word is at least a token
        return text if self.tokenizer is None else _trimmed(text, num_tokens, self.tokenizer)


def load_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of a model's directory. Raises ConfigError if there is none that can be
    read."""
    path = directory / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower type
        raise ConfigError(f"--tokenizer: cannot read {path}: {error}") from error


def plain_ids(tokenizer: Tokenizer) -> list[int]:
    """Every token id but the special ones."""
    special = tokenizer.get_added_tokens_decoder()
    return [token_id for token_id in range(tokenizer.get_vocab_size()) if token_id not in special]


def _trimmed(text: str, num_tokens: int, tokenizer: Tokenizer) -> str:
    """The text cut to so many tokens.

    A cut inside a word may give other tokens than it had, hence the few rounds.
    """
    for _ in range(_MAX_ROUNDS):
        encoding = tokenizer.encode(text, add_special_tokens=False)
        missing = num_tokens - len(encoding.ids)
        if missing == 0:
            break
        if missing > 0:
            text += " a" * missing
        else:
            text = text[: encoding.offsets[num_tokens - 1][1]]
    return text
