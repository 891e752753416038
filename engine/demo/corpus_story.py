"""Long stories assembled from parts, each part in several variants.

A story is a list of sentences, so that it can be cut anywhere and gone on with.
Knows nothing of conversations.
"""

import random
from dataclasses import dataclass

from penstock.engine.demo.corpus_words import WORDS, invented_word, proper_name

OPENINGS = (
    "Once upon a time there lived {a_kind} called {hero}.",
    "Long ago, in the days of the old kings, there was {a_kind} whose name was {hero}.",
    "This is the story of {hero}, {a_kind} who wanted to see the world.",
    "Far away, behind seven hills, lived {a_kind} by the name of {hero}.",
)
KINDS = (
    "a young miller", "a clever fox", "a brave girl", "a quiet boy", "an old sailor",
    "a small robot",
    "a curious owl", "a poor painter", "a friendly dragon", "a patient gardener",
)  # fmt: skip
HOMES = (
    "a village by the river", "a house at the edge of the forest", "a town below the mountains",
    "a mill beside a waterfall", "a lighthouse on a cliff", "a valley full of flowers",
)  # fmt: skip
PARTS: tuple[tuple[str, ...], ...] = (
    (
        "The home of {hero} was {home}, and everybody there knew everybody else.",
        "{hero} lived in {home}, where the days were long and calm.",
        "In {home} {hero} had a warm bed, a full table and many friends.",
    ),
    (
        "Every morning {hero} looked at the hills and thought about {topic}.",
        "More than anything else {hero} loved to hear about {topic}.",
        "There was only one thing that {hero} dreamed of, and that was {topic}.",
    ),
    (
        "One day a stranger with a grey coat came to the door.",
        "One stormy night somebody knocked three times at the window.",
        "Then, on the first day of spring, a letter arrived without a name on it.",
        "One evening a small bird sat down on the fence and began to speak.",
    ),
    (
        '"Go to the {place}," said the voice, "and there you will find {topic}."',
        'The message was short: "Look for {topic} at the {place}, and come before the moon is full."',
        '"I know a secret about {topic}," it said, "but it is hidden at the {place}."',
    ),
    (
        "{hero} packed some bread, an apple and a {thing}, and left before the sun was up.",
        "So {hero} took a {thing}, closed the door and walked away without looking back.",
        "{hero} did not sleep that night, and in the morning put a {thing} into a bag and set off.",
    ),
    (
        "The road was long, and the rain fell for three days.",
        "At first the way was easy, and the sun shone on the fields.",
        "The first days were cold, and the wind came from the north.",
    ),
    (
        "On the fourth day {hero} met {friend}, who was sitting on a stone and crying.",
        "At a crossing in the forest {hero} met {friend}, who had lost the way.",
        "Under an old bridge {hero} found {friend}, who was tired and hungry.",
    ),
    (
        '"What is the matter?" asked {hero}. "I have nobody to walk with," said {friend}.',
        '"Where are you going?" asked {friend}. "To the {place}," said {hero}. "Come with me."',
        "{hero} shared the bread with {friend}, and from then on they were two.",
    ),
    (
        "Together they crossed a wide river on a raft made of old doors.",
        "Together they climbed a mountain so high that the clouds were below them.",
        "Together they walked through a forest where no bird was singing.",
        "Together they passed a desert, and at night they counted the stars.",
    ),
    (
        "There a wolf stood in their way and would not let them pass.",
        "There an old woman guarded the path and asked them a riddle.",
        "There a giant slept across the road, and his breath shook the trees.",
    ),
    (
        "{friend} was afraid, but {hero} held up the {thing} and spoke in a calm voice.",
        "{hero} thought for a while, and then gave away the {thing} as a present.",
        "They waited until it was dark, and {hero} lit the way with the {thing}.",
    ),
    (
        "After that nobody stopped them any more, and they went on.",
        "It was a good idea, and soon the way was free.",
        "That helped, and they laughed about it for the rest of the day.",
    ),
    (
        "At last they saw the {place}, shining in the evening light.",
        "When the moon was nearly full, they reached the {place}.",
        "And then, behind the last hill, there was the {place}.",
    ),
    (
        "The gate was locked, and over it stood the words: only those who ask may enter.",
        "It was silent there, and the door was so small that they had to bend down.",
        "A hundred steps led up to it, and on every step lay a white feather.",
    ),
    (
        '"May we come in?" asked {hero}, and the door opened by itself.',
        "{friend} knocked, {hero} sang an old song, and slowly the door opened.",
        "{hero} said the name of {friend} aloud, and the lock fell to the ground.",
    ),
    (
        "Inside there was a single room with a table, and on the table lay a book about {topic}.",
        "Inside they found a lamp, and in its light they saw all there is to know about {topic}.",
        "Inside sat the stranger and smiled, and told them everything about {topic} until the morning.",
    ),
    (
        'They read all night long, and {hero} said: "Now I understand."',
        '"So that is it," said {hero}, and {friend} nodded.',
        "{hero} was silent for a long time, for it was quite different from the dreams.",
    ),
    (
        "In the morning they began the long way home.",
        "Then they turned around, for the best part of a secret is to share it.",
        "The way back was shorter, as ways back often are.",
    ),
    (
        "When they came to {home}, all the people ran out to meet them.",
        "At {home} the lamps were lit, and a soup stood on the fire.",
        "Nobody at {home} had forgotten them, and there was a feast for two days.",
    ),
    (
        "{hero} told the story of {topic} again and again, and it became longer every time.",
        "{friend} stayed, and on winter evenings they both talked about {topic}.",
        "From that day on children came to {hero} to hear about {topic}.",
    ),
)
PLACES = (
    "old tower", "silent lake", "glass castle", "end of the valley", "hidden garden", "blue cave",
    "stone bridge", "northern lighthouse",
)  # fmt: skip
THINGS = (
    "lantern",
    "silver key",
    "wooden flute",
    "small mirror",
    "red scarf",
    "rope",
    "golden bell",
)
TOPICS = (
    "the sea", "a lost treasure", "the stars", "a singing river", "the first winter",
    "a flying boat",
    "dragons", "robots", "a wise cat", "the moon", "music", "time", "a magic tree", "trains",
    "water",
)  # fmt: skip
ENDINGS = (
    "And if you pass that way, you may still hear it. The end.",
    "And they lived happily ever after. The end.",
    "And so the story ends where it began. The end.",
)


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
