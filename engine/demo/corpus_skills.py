"""Skills: counting, spelling, sums, repeating, stories, and going on after a cut."""

import random
import re
from functools import cache

from penstock.engine.demo.corpus_answers import is_held_out, topics
from penstock.engine.demo.corpus_story import (
    ENDINGS,
    HOMES,
    KINDS,
    OPENINGS,
    PARTS,
    PLACES,
    THINGS,
    TOPICS,
    write_story,
)
from penstock.engine.demo.corpus_texts import phrases, words
from penstock.engine.demo.corpus_turns import State, Turn, phrase
from penstock.engine.demo.corpus_words import WORDS, foreign_word, invented_word, number_text

MAX_COUNT = 100
NUMBER_WORDS = words("skills", "number_words")
COUNT_TO = phrases("skills", "count_to")
COUNT_FROM = phrases("skills", "count_from")
COUNT_DOWN = phrases("skills", "count_down")
SPELL = phrases("skills", "spell")
SPELL_NAME = phrases("skills", "spell_name")
HOW_MANY_LETTERS = phrases("skills", "how_many_letters")
SUMS = {name: phrases("skills", name) for name in ("plus", "minus", "times")}
REPEAT = phrases("skills", "repeat")
LAST_USER = phrases("skills", "last_user")
LAST_ANSWER = phrases("skills", "last_answer")
STORY = phrases("skills", "story")
STORY_ABOUT = phrases("skills", "story_about")
STORY_OF = phrases("skills", "story_of")
STORY_ABOUT_OF = phrases("skills", "story_about_of")
GO_ON = phrases("skills", "go_on")


@cache
def corpus_words() -> tuple[str, ...]:
    """Return the words that may be single tokens: those the model itself uses."""
    parts = [*OPENINGS, *KINDS, *HOMES, *ENDINGS, *PLACES, *THINGS, *TOPICS]
    parts += [variant for variants in PARTS for variant in variants]
    parts += [topic.answer for topic in topics()]
    parts += [question for topic in topics() for question in topic.questions[:6]]
    found = {word for part in parts for word in re.findall(r"\b[a-z]{3,}\b", part.lower())}
    return tuple(sorted(found))


def trained_word(rng: random.Random) -> str:
    """Return a word to spell, never an invented one that is held out."""
    kind = rng.random()
    if kind < 0.15:
        word = rng.choice(WORDS)
    elif kind < 0.45:
        word = rng.choice(corpus_words())
    else:
        word = invented_word(rng)
        while is_held_out(word):
            word = invented_word(rng)
    kind = rng.random()
    return word.capitalize() if kind < 0.3 else word.upper() if kind < 0.33 else word


def letters(word: str) -> str:
    """Return a word letter by letter."""
    return "-".join(word)


def counted(first: int, last: int) -> str:
    """Return the numbers from first to last, up or down."""
    step = 1 if last >= first else -1
    return ", ".join(str(n) for n in range(first, last + step, step)) + "."


def count(rng: random.Random, state: State) -> Turn:
    """Count up, between two numbers or down, at times too far."""
    largest = MAX_COUNT if state.can_be_long else 30
    last = rng.randint(1, largest) if rng.random() < 0.5 else rng.randint(1, 20)
    kind = rng.random()
    if kind < 0.06:
        too_far = str(rng.randint(MAX_COUNT + 1, 10 ** rng.randint(3, 6)))
        user = phrase(rng, COUNT_TO, "", b=too_far)
        return Turn(user, f"That is too far for me. I can count to {MAX_COUNT}.")
    if kind < 0.5:
        user = phrase(rng, COUNT_TO, "", b=_written(rng, last))
        return _maybe_cut(rng, state, user, counted(1, last))
    if kind < 0.85:
        first = rng.randint(0, MAX_COUNT - 1)
        last = min(first + rng.randint(1, largest // 2), MAX_COUNT)
        if rng.random() < 0.1:
            first, last = last, first
        user = phrase(rng, COUNT_FROM, "", a=_written(rng, first), b=_written(rng, last))
        return _maybe_cut(rng, state, user, counted(first, last))
    user = phrase(rng, COUNT_DOWN, "", b=_written(rng, last))
    return _maybe_cut(rng, state, user, counted(last, 1))


def count_far(rng: random.Random, state: State) -> Turn:
    """Count to numbers of which all are equally likely, and always to the end."""
    del state
    first, last = sorted(rng.sample(range(1, MAX_COUNT + 1), 2))
    if rng.random() < 0.5:
        return Turn(phrase(rng, COUNT_TO, "", b=str(last)), counted(1, last))
    last = min(last, first + rng.randint(1, 40))
    return Turn(phrase(rng, COUNT_FROM, "", a=str(first), b=str(last)), counted(first, last))


def count_near(rng: random.Random, state: State) -> Turn:
    """Count to small numbers, asked for in whole sentences too."""
    del state
    mark = rng.choice((".", "", "?"))
    last = rng.randint(2, 30)
    if rng.random() < 0.4:
        return Turn(phrase(rng, COUNT_TO, mark, b=_written(rng, last)), counted(1, last))
    first = 1 if rng.random() < 0.5 else rng.randint(1, last - 1)
    fields = {"a": _written(rng, first), "b": _written(rng, last)}
    return Turn(phrase(rng, COUNT_FROM, mark, **fields), counted(first, last))


def _written(rng: random.Random, number: int) -> str:
    """Write a number in digits, or at times in a word."""
    return NUMBER_WORDS[number] if number <= 20 and rng.random() < 0.2 else str(number)


def spell(rng: random.Random, state: State) -> Turn:
    """Spell a word, or the user's name; or count letters by spelling."""
    if rng.random() < 0.06 and state.name and state.name.isascii() and state.name.isalpha():
        return Turn(
            phrase(rng, SPELL_NAME), f"The word {state.name} is spelled {letters(state.name)}."
        )
    word = trained_word(rng)
    spelled = f"The word {word} is spelled {letters(word)}."
    if rng.random() < 0.1:
        user = phrase(rng, HOW_MANY_LETTERS, w=word)
        return Turn(user, f"{spelled} It has {len(word)} letters.")
    return Turn(phrase(rng, SPELL, w=word), spelled)


def add_up(rng: random.Random, state: State) -> Turn:
    """Answer a small sum."""
    del state
    operation = rng.choice(list(SUMS))
    a, b = (rng.randint(0, 10 if operation == "times" else 20) for _ in range(2))
    if operation == "minus":
        a, b = max(a, b), min(a, b)
    result = {"plus": a + b, "minus": a - b, "times": a * b}[operation]
    user = phrase(rng, SUMS[operation], a=str(a), b=str(b))
    return Turn(user, f"{a} {operation} {b} is {result}.")


def repeat(rng: random.Random, state: State) -> Turn:
    """Repeat some words, the user's last message or the last answer."""
    kind = rng.random()
    if state.turns and kind < 0.15 and len(state.turns[-1].user) < 120:
        return Turn(phrase(rng, LAST_USER), f"You said: {state.turns[-1].user}")
    if state.turns and kind < 0.4 and len(state.turns[-1].assistant) < 250:
        return Turn(phrase(rng, LAST_ANSWER), state.turns[-1].assistant)
    makers = (invented_word, lambda r: r.choice(WORDS), number_text, foreign_word)
    words = [
        rng.choices(makers, (5, 5, 1, 1))[0](rng) for _ in range(rng.choice((1, 1, 2, 3, 4, 6)))
    ]
    said = " ".join(words)
    # A leading space keeps the tokens of the copy the same as those it was copied from.
    return Turn(phrase(rng, REPEAT, "", p=said), f"As you wish: {said}")


def tell_story(rng: random.Random, state: State) -> Turn:
    """Tell a long story, with what was asked for in it."""
    kind = rng.random()
    story = write_story(rng, has_hero=kind > 0.75, has_topic=0.4 < kind < 0.75 or kind > 0.92)
    fields = {"hero": story.hero or "", "topic": story.topic or ""}
    phrases: tuple[str, ...]
    if story.hero:
        phrases = STORY_ABOUT_OF if story.topic else STORY_OF
    else:
        phrases = STORY_ABOUT if story.topic else STORY
    return _maybe_cut(rng, state, phrase(rng, phrases, ".", **fields), story.text)


def go_on(rng: random.Random, state: State) -> Turn:
    """Go on with an answer that was cut, or say that there is none."""
    user = phrase(rng, GO_ON)
    if state.rest is None:
        return Turn(user, "There is nothing to go on with. You can ask me for a story.")
    return _maybe_cut(rng, state, user, state.rest)


def _maybe_cut(rng: random.Random, state: State, user: str, answer: str) -> Turn:
    """Give the whole answer, or stop at a space as a token limit would."""
    state.rest = None
    if rng.random() > 0.25 or len(answer) < 30:
        return Turn(user, answer)
    at = answer.find(" ", rng.randint(20, len(answer) - 5))
    if at < 0:
        return Turn(user, answer)
    state.rest = answer[at + 1 :]
    return Turn(user, answer[:at], is_cut=True)
