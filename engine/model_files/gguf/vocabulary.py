"""The vocabulary of a GGUF file: what its keys `tokenizer.…` say, each of them checked.

Source: docs/gguf.md of ggml; what is absent, or told by a token's text only, is as in llama.cpp
(`llama-vocab.cpp`).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from penstock.engine.errors import ModelLoadError
from penstock.engine.model_files.config_fields import shown
from penstock.engine.model_files.end_tokens import END_TEXTS, MESSAGE_END, are_harmony
from penstock.engine.text.fill_in_middle import MARKERS

TOKENS = "tokenizer.ggml.tokens"
# The longest tokens of published vocabularies have 512 characters; all together, 2 million.
MAX_TOKEN_CHARS = 1024
MAX_VOCABULARY_CHARS = 1 << 24
_NONE = (1 << 32) - 1  # what converters write for an id of -1
# Of special tokens, and what the file's keys call them.
_NAMES = {
    "bos": "bos", "eos": "eos", "eot": "eot", "eom": "eom", "unk": "unknown", "sep": "seperator",
    "pad": "padding", "cls": "cls", "mask": "mask",
}  # fmt: skip
_REQUIRED = ("bos", "eos")  # of other ids, those that are none are left out, as in llama.cpp
# Of `FillInMiddle`, and the file's names for them, the older one last.
_FIM_NAMES = {
    "pre": ("fim_pre", "prefix"),
    "suf": ("fim_suf", "suffix"),
    "mid": ("fim_mid", "middle"),
    "pad": ("fim_pad",),
    "rep": ("fim_rep",),
    "sep": ("fim_sep",),
    "eot": ("eot",),
}
# Some vocabularies have these as plain text, such as HTML's `</s>` in Gemma's: they are ends only
# where the file says that they are control tokens.
_ENDS_OR_TEXT = frozenset({"</s>", "<eos>", "[EOS]", "[EOT]", "<EOT>", "_<EOT>"})
# Numbers of tokens that SentencePiece has by default.
_SENTENCEPIECE_IDS = {"unk": 0, "bos": 1, "eos": 2}
_BERT_TEXTS = {"cls": "[CLS]", "sep": "[SEP]", "unk": "[UNK]", "pad": "[PAD]", "mask": "[MASK]"}


class TokenType(enum.IntEnum):
    """The kinds in `tokenizer.ggml.token_type`. Any other number counts as undefined, that as
    unused."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Keys:
    """A file's metadata, key by key.

    Every method raises a ModelLoadError that names the key if its value is of another type.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def text(self, key: str, default: str = "") -> str:
        value = self._values.get(key, default)
        if not isinstance(value, str):
            raise ModelLoadError(f"{key} is {shown(value)}, not a string")
        _check_unicode(key, value)
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._values.get(key, default)
        if not isinstance(value, bool):
            raise ModelLoadError(f"{key} is {shown(value)}, not true or false")
        return value

    def strings(self, key: str) -> list[str]:
        values = self._list(key, "strings", str)
        _check_unicode(key, "".join(values))
        return values

    def integers(self, key: str) -> list[int]:
        return self._list(key, "integers", int)

    def numbers(self, key: str) -> list[float]:
        values: list[float] = self._list(key, "numbers", int, float)
        if not all(map(math.isfinite, values)):
            raise ModelLoadError(f"{key} has numbers that are infinite or not a number")
        return values

    def token_id(self, name: str) -> int | None:
        """The id in `tokenizer.ggml.NAME_token_id`; None: the file has none, or -1. It may be
        beyond the vocabulary."""
        key = id_key(name)
        value = self._values.get(key)
        if value is None:
            return None
        if type(value) is not int:
            raise ModelLoadError(f"{key} is {shown(value)}, not a token id")
        return None if value in (-1, _NONE) else value

    def _list(self, key: str, what: str, *types: type) -> list[Any]:
        values = self._values.get(key)
        if not isinstance(values, list):
            reason = "is missing" if values is None else f"is {shown(values)}, not a list"
            raise ModelLoadError(f"{key} {reason}")
        if not set(map(type, values)) <= {*types}:
            number, wrong = next(
                (number, each) for number, each in enumerate(values) if type(each) not in types
            )
            raise ModelLoadError(f"{key} has {shown(wrong)} as item {number}, not only {what}")
        return values


def id_key(name: str) -> str:
    """The key of a special token's id."""
    return f"tokenizer.ggml.{name}_token_id"


def _check_unicode(key: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise ModelLoadError(f"{key} is not valid Unicode: it has U+{code:04X}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Special:
    """Ids of special tokens; None: the vocabulary has no such token."""

    bos: int | None = None
    eos: int | None = None
    eot: int | None = None
    eom: int | None = None
    unk: int | None = None
    sep: int | None = None
    pad: int | None = None
    cls: int | None = None
    mask: int | None = None


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Attributes:
    tokens: their texts, as the model of the tokenizer spells them.
    types: of each token; those that llama.cpp knows by their text are control tokens.
    scores: of each token; None: the file has none.
    end_ids: any of them ends an answer; in ascending order.
    fim_ids: by the names of `FillInMiddle`.
    """

    model: str
    tokens: list[str]
    types: list[int]
    scores: list[float] | None
    special: Special
    end_ids: tuple[int, ...]
    fim_ids: Mapping[str, int]

    @classmethod
    def read(cls, keys: Keys) -> Vocabulary:
        """Raises:
        ModelLoadError: with the key that is missing or wrong.
        """
        model = keys.text("tokenizer.ggml.model")
        tokens = _tokens(keys)
        num_tokens = len(tokens)
        types = [int(TokenType.NORMAL)] * num_tokens
        if "tokenizer.ggml.token_type" in keys:
            types = list(keys.integers("tokenizer.ggml.token_type"))
            _check_length("tokenizer.ggml.token_type", types, num_tokens)
        scores = None
        if "tokenizer.ggml.scores" in keys:
            scores = keys.numbers("tokenizer.ggml.scores")
            _check_length("tokenizer.ggml.scores", scores, num_tokens)
        ids = dict(zip(tokens, range(num_tokens), strict=True))
        if len(ids) < num_tokens:
            second = next(number for number, text in enumerate(tokens) if ids[text] != number)
            raise ModelLoadError(
                f"{TOKENS}: tokens {second} and {ids[tokens[second]]} are both "
                f"{shown(tokens[second])}"
            )
        for number in (number for number, text in enumerate(tokens) if not text):
            tokens[number], types[number] = f"[EMPTY_{number}]", TokenType.UNUSED
        special = _special(keys, model, ids, types)
        ends = _ends_by_text(ids, types)
        for token_id in ends:
            types[token_id] = TokenType.CONTROL
        for token_id in (ids[text] for text in MARKERS if text in ids):
            if types[token_id] in (TokenType.NORMAL, TokenType.UNDEFINED):
                types[token_id] = TokenType.CONTROL
        named = (special.eos, special.eot, special.eom)
        return cls(
            model=model,
            tokens=tokens,
            types=types,
            scores=scores,
            special=special,
            end_ids=tuple(sorted({*ends, *(each for each in named if each is not None)})),
            fim_ids=_fim_ids(keys, num_tokens),
        )

    def named_ids(self) -> Iterator[tuple[str, int]]:
        """The file's names for special tokens that it has, with their ids."""
        for name, own in _NAMES.items():
            token_id = getattr(self.special, name)
            if token_id is not None:
                yield own, token_id

    @cached_property
    def added_ids(self) -> list[int]:
        """The ids of tokens that a text is split at before all else."""
        added = (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN)
        return [number for number, each in enumerate(self.types) if each in added]

    @cached_property
    def added(self) -> frozenset[int]:
        return frozenset(self.added_ids)

    def text(self, token_id: int | None) -> str | None:
        return None if token_id is None else self.tokens[token_id]


def _tokens(keys: Keys) -> list[str]:
    tokens = list(keys.strings(TOKENS))
    if not tokens:
        raise ModelLoadError(f"{TOKENS} is empty")
    lengths = [*map(len, tokens)]
    if max(lengths) > MAX_TOKEN_CHARS:
        number = lengths.index(max(lengths))
        raise ModelLoadError(
            f"{TOKENS}: token {number} has {lengths[number]:,} characters, more than "
            f"{MAX_TOKEN_CHARS:,}"
        )
    if sum(lengths) > MAX_VOCABULARY_CHARS:
        raise ModelLoadError(
            f"{TOKENS} has {sum(lengths):,} characters, more than {MAX_VOCABULARY_CHARS:,}"
        )
    return tokens


def _check_length(key: str, values: list[Any], num_tokens: int) -> None:
    if len(values) != num_tokens:
        raise ModelLoadError(f"{key} has {len(values):,} items for {num_tokens:,} tokens")


def _special(keys: Keys, model: str, ids: Mapping[str, int], types: list[int]) -> Special:
    found = dict[str, int]()
    for name, own in _NAMES.items():
        token_id = keys.token_id(own)
        if token_id is None:
            continue
        if 0 <= token_id < len(ids):
            found[name] = token_id
        elif name in _REQUIRED:
            raise ModelLoadError(
                f"{id_key(own)} is {token_id:,}, and the vocabulary has {len(ids):,} tokens"
            )
    defaults = dict[str, int]()
    if model == "llama":
        marks = (TokenType.CONTROL, TokenType.UNKNOWN)
        defaults = {
            name: number
            for name, number in _SENTENCEPIECE_IDS.items()
            if number < len(types) and types[number] in marks and id_key(_NAMES[name]) not in keys
        }
    elif model == "bert":
        defaults = {name: ids[text] for name, text in _BERT_TEXTS.items() if text in ids}
        defaults |= {"cls": found["bos"]} if "bos" in found else {}
    if TokenType.UNKNOWN in types:
        defaults.setdefault("unk", types.index(TokenType.UNKNOWN))
    return Special(**{**defaults, **found})


def _ends_by_text(ids: Mapping[str, int], types: list[int]) -> list[int]:
    """Tokens whose text marks an end, which llama.cpp adds: a fine-tune to chat may name the end of
    its base model only."""
    texts = [
        text
        for text in END_TEXTS
        if text in ids and (text not in _ENDS_OR_TEXT or types[ids[text]] == TokenType.CONTROL)
    ]
    return [ids[text] for text in texts if text != MESSAGE_END or not are_harmony(texts)]


def _fim_ids(keys: Keys, num_tokens: int) -> dict[str, int]:
    found = dict[str, int]()
    for name, own in _FIM_NAMES.items():
        for each in own:
            token_id = keys.token_id(each)
            if token_id is not None and 0 <= token_id < num_tokens:
                found.setdefault(name, token_id)
    return found if found.keys() >= {"pre", "suf"} else {}
