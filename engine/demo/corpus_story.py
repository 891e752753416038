"""Long stories assembled from parts, each part in several variants.

A story is a list of sentences, so that it can be cut anywhere and gone on with.
"""

import random
from dataclasses import dataclass

from penstock.engine.demo.corpus_texts import groups, phrases
from penstock.engine.demo.corpus_words import WORDS, invented_word, proper_name

OPENINGS = phrases("story", "openings")
KINDS = phrases("story", "kinds")
HOMES = phrases("story", "homes")
PARTS = groups("story", "parts")
PLACES = phrases("story", "places")
THINGS = phrases("story", "things")
TOPICS = phrases("story", "topics")
ENDINGS = phrases("story", "endings")


@dataclass(frozen=True, slots=True)
class Story:
    """What was asked for, and the sentences told."""

    hero: str | None
    topic: str | None
    sentences: tuple[str, ...]

    @property
    def text(self) -> str:
        """Return the whole story."""
        return " ".join(self.sentences)


def invented_topic(rng: random.Random) -> str:
    """Return something a story can be about."""
    if rng.random() < 0.5:
        return rng.choice(TOPICS)
    noun = rng.choice(WORDS) if rng.random() < 0.6 else invented_word(rng)
    return f"{rng.choice(('a', 'the', 'the last', 'the old'))} {noun}"


def write_story(rng: random.Random, *, has_hero: bool, has_topic: bool) -> Story:
    """Assemble a story about an asked hero and topic, or about ones of its own."""
    hero = proper_name(rng) if has_hero else rng.choice(("Mira", "Tobin", "Elka", "Jory"))
    topic = invented_topic(rng) if has_topic else rng.choice(TOPICS)
    fields = {
        "hero": hero,
        "topic": topic,
        "friend": rng.choice(("Pell", "Sanna", "Orrin", "Little Wim")),
        "a_kind": rng.choice(KINDS),
        "home": rng.choice(HOMES),
        "place": rng.choice(PLACES),
        "thing": rng.choice(THINGS),
    }
    parts = (OPENINGS, *PARTS, ENDINGS)
    sentences = tuple(rng.choice(variants).format(**fields) for variants in parts)
    return Story(hero if has_hero else None, topic if has_topic else None, sentences)
