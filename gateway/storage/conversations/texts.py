"""The text of conversations that a search looks through, and what a word of a query matches.

Messages and titles are searched. Case, accents and punctuation do not count. A word of three
letters or more matches the beginning of a word, a shorter one a whole word. Chinese and Japanese
are written without spaces: each character is a word of its own, and those of a query must follow
each other.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from functools import lru_cache

from penstock.gateway.storage.conversations.records import Item

MAX_TEXT_CHARS = 1 << 18  # of a turn; what is behind is not found
MIN_PREFIX_CHARS = 3
MAX_WORDS = 16  # of a query
_EXCERPT_CHARS, _LEAD_CHARS = 160, 40
_TEXT_PARTS = ("input_text", "output_text", "text", "refusal")
_WORD = re.compile(r"[^\W_]+")
# Han, Hiragana, Katakana; Korean and Thai are found by the beginnings of their runs.
_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003134f"
_APART = re.compile(f"(?<=[{_CJK}])|(?=[{_CJK}])")
_IS_CJK = re.compile(f"[{_CJK}]")
_ACCENTED = re.compile("[\u0080-\u2e7f]+")
_GAP = "\u200b"  # zero width space, between words that are written together


def text_of(items: Iterable[Item]) -> str:
    """The text of the messages among a turn's items, one line each."""
    texts = []
    for item in items:
        if item.get("type", "message") != "message":
            continue
        content = item.get("content") or ()
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        for part in parts:
            text = part.get("text") or part.get("refusal")
            if isinstance(text, str) and part.get("type", "text") in _TEXT_PARTS:
                texts.append(text)
    return "\n".join(texts)[:MAX_TEXT_CHARS]


def spaced(text: str) -> str:
    """A text whose words are apart, for an index; `unspaced` undoes it."""
    return _APART.sub(_GAP, text) if _IS_CJK.search(text) else text


def unspaced(text: str) -> str:
    return text.replace(_GAP, "")


def phrases_of(query: str) -> list[list[str]]:
    """What must all be found: sequences of words, folded."""
    phrases = (_words(spaced(_folded(part))) for part in query.split())
    return [words for words in phrases if words][:MAX_WORDS]


def takes_prefix(word: str) -> bool:
    """Whether a query's word matches the beginnings of words."""
    return len(word) >= MIN_PREFIX_CHARS and not _IS_CJK.match(word)


def matches(text: str, phrases: Sequence[Sequence[str]]) -> bool:
    """Whether a text has all phrases."""
    joined = f" {' '.join(_words(spaced(_folded(text))))} "
    return all(_pattern(tuple(phrase)).search(joined) for phrase in phrases)


def excerpt(text: str, phrases: Sequence[Sequence[str]]) -> str:
    """The text around the first phrase, in one line."""
    text = " ".join(text.split())
    found = min((_place(text, phrase) for phrase in phrases), default=0)
    start = max(0, found - _LEAD_CHARS)
    shown = text[start : start + _EXCERPT_CHARS]
    end = start + len(shown)
    return f"{'…' if start else ''}{shown.strip()}{'…' if end < len(text) else ''}"


def _place(text: str, phrase: Sequence[str]) -> int:
    found = re.search(r"\W*".join(map(re.escape, phrase)), text, re.IGNORECASE)
    return len(text) if found is None else found.start()


def _folded(text: str) -> str:
    return (text if text.isascii() else _ACCENTED.sub(_without_accents, text)).lower()


def _without_accents(match: re.Match[str]) -> str:
    decomposed = unicodedata.normalize("NFD", match[0])
    return "".join(c for c in decomposed if unicodedata.category(c)[0] != "M")


def _words(text: str) -> list[str]:
    return _WORD.findall(text)


@lru_cache(maxsize=256)
def _pattern(phrase: tuple[str, ...]) -> re.Pattern[str]:
    end = "" if takes_prefix(phrase[-1]) else " "
    return re.compile(re.escape(f" {' '.join(phrase)}") + end)
