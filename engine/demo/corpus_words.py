"""Invented names and words, real words, and small damage to a user's typing.

Names are invented so freely that a model can only learn to copy them, not to know them.
"""

import random
import re
from collections.abc import Sequence

from penstock.engine.demo.corpus_texts import phrases, words

ONSETS = words("words", "onsets")
VOWELS = words("words", "vowels")
CODAS = words("words", "codas")
ENDINGS = words("words", "endings")
SCRIPTS = (
    (0xE0, 0xF6), (0xF8, 0xFF), (0x101, 0x17F), (0x3B1, 0x3C9), (0x430, 0x44F), (0x5D0, 0x5EA),
    (0x3041, 0x3093), (0x4E00, 0x9FA5), (0xAC00, 0xD7A3), (0x1F300, 0x1F5FF),
)  # fmt: skip
KNOWN_NAMES = phrases("words", "known_names")
KNOWN_CITIES = phrases("words", "known_cities")
COLOURS = phrases("words", "colours")
FOODS = phrases("words", "foods")
JOBS = phrases("words", "jobs")
WORDS = words("words", "words")
NEIGHBOURS = "qwertyuiop asdfghjkl zxcvbnm"


def syllable(rng: random.Random) -> str:
    """Return one invented syllable."""
    coda = rng.choice(CODAS) if rng.random() < 0.4 else ""
    return rng.choice(ONSETS) + rng.choice(VOWELS) + coda


def invented_word(rng: random.Random) -> str:
    """Return a lower-case word of one to four invented parts."""
    kind = rng.random()
    if kind < 0.12:
        letters = "abcdefghijklmnopqrstuvwxyz"
        return "".join(rng.choice(letters) for _ in range(rng.randint(2, 9)))
    word = "".join(syllable(rng) for _ in range(rng.choice((1, 1, 2, 2, 2, 3))))
    if rng.random() < 0.5:
        word += rng.choice(ENDINGS)
    if rng.random() < 0.15:
        word = rng.choice("aeiou") + word
    return word


def foreign_word(rng: random.Random) -> str:
    """Return letters of one other script, or accents inside an invented word."""
    low, high = rng.choice(SCRIPTS)
    if high < 0x180 and rng.random() < 0.8:
        word = list(invented_word(rng))
        word[rng.randrange(len(word))] = chr(rng.randint(low, high))
        return "".join(word)
    return "".join(chr(rng.randint(low, high)) for _ in range(rng.randint(1, 4)))


def proper_name(rng: random.Random, known: Sequence[str] = KNOWN_NAMES) -> str:
    """Return a name: usually invented and capitalised, at times known, in two words or odd."""
    kind = rng.random()
    if kind < 0.08:
        name = rng.choice(known)
    elif kind < 0.13:
        name = foreign_word(rng).capitalize()
    elif kind < 0.22:
        name = f"{invented_word(rng).capitalize()} {invented_word(rng).capitalize()}"
    elif kind < 0.25:
        name = f"{invented_word(rng).capitalize()}-{invented_word(rng).capitalize()}"
    elif kind < 0.28:
        name = rng.choice(WORDS).capitalize()
    else:
        name = invented_word(rng).capitalize()
    if rng.random() < 0.12:
        return name.lower()
    return name.upper() if rng.random() < 0.02 else name


def choose_or_invent(rng: random.Random, known: Sequence[str]) -> str:
    """Return a known word or, often enough that copying is what counts, an invented one."""
    return rng.choice(known) if rng.random() < 0.55 else invented_word(rng)


def number_text(rng: random.Random) -> str:
    """Return a number of one to five digits."""
    return str(rng.randrange(10 ** rng.choice((1, 2, 2, 3, 4, 5))))


def _typo(rng: random.Random, word: str) -> str:
    if len(word) < 4 or not word.isalpha():
        return word
    at = rng.randrange(1, len(word) - 1)
    kind = rng.randrange(4)
    if kind == 0:
        return word[:at] + word[at + 1 :]
    if kind == 1:
        return word[:at] + word[at] + word[at:]
    if kind == 2:
        return word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    place = NEIGHBOURS.find(word[at].lower())
    return word[:at] + NEIGHBOURS[max(place - 1, 0)].strip() + word[at + 1 :]


def damage(rng: random.Random, template: str) -> str:
    """Return a user's template as somebody might type it; `{…}` fields stay whole."""
    words = template.split(" ")
    if rng.random() < 0.22:
        at = rng.randrange(len(words))
        if "{" not in words[at]:
            words[at] = _typo(rng, words[at])
    text = " ".join(words)
    if rng.random() < 0.5:
        text = re.sub(r"\bi\b", "I", text)
    kind = rng.random()
    if kind < 0.40:
        text = text[:1].upper() + text[1:]
    elif kind < 0.42:
        text = text if "{" in text else text.upper()
    return text


def punctuate(rng: random.Random, text: str, mark: str) -> str:
    """End a user's message with its mark, or carelessly."""
    kind = rng.random()
    if kind < 0.55:
        return text + mark
    if kind < 0.93:
        return text
    return text + rng.choice(("??", "!", " ?", " !", "...", ".", " :)", "!!"))
