"""Turns of a conversation, and how users phrase them."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.engine.demo.corpus_answers import is_held_out
from penstock.engine.demo.corpus_texts import phrases
from penstock.engine.demo.corpus_words import damage, punctuate


@dataclass(frozen=True, slots=True)
class Step:
    """An answer that calls tools, and the user's turn with their results."""

    assistant: str
    results: str
    thought: str


@dataclass(frozen=True, slots=True)
class Turn:
    """A user's message and the answer to it, which may come after calls of tools."""

    user: str
    assistant: str
    is_cut: bool = False  # the answer stops in the middle, as at a token limit
    num_given: int = 0  # characters at the answer's beginning that are not the model's choice
    steps: tuple[Step, ...] = ()
    thought: str = ""  # before the answer, where thoughts are asked for


@dataclass(slots=True)
class State:
    """What a conversation has established so far."""

    facts: dict[str, str] = field(default_factory=dict)  # key → the sentence that states it
    name: str | None = None
    turns: list[Turn] = field(default_factory=list)
    rest: str | None = None  # what a cut answer still owes
    can_be_long: bool = True  # whether there is room for a story
    uses_all_phrases: bool = False  # facts are told and asked for in held-out phrasings too
    has_asides: bool = False  # users add that a fact is to be remembered
    tools: tuple[str, ...] = ()  # that are offered, with their parameters

    def usable(self, phrases: Sequence[str]) -> Sequence[str]:
        """Return the phrasings that this conversation may use for a fact."""
        return phrases if self.uses_all_phrases else train_split(phrases)


def train_split(phrases: Sequence[str]) -> list[str]:
    """Return the phrasings that training may see; the first is always among them."""
    return [p for i, p in enumerate(phrases) if i == 0 or not is_held_out(p)]


def test_split(phrases: Sequence[str]) -> list[str]:
    """Return the phrasings kept for evaluation."""
    return [p for p in phrases[1:] if is_held_out(p)]


def phrase(rng: random.Random, phrases: Sequence[str], mark: str = "?", **fields: str) -> str:
    """Return one of the trained phrasings as somebody might type it, with its fields filled."""
    return type_out(rng, rng.choice(train_split(phrases)), mark, **fields)


FRAMES = phrases("questions", "frames")


def type_out(rng: random.Random, template: str, mark: str, **fields: str) -> str:
    """Return a template as somebody might type it, with its fields filled."""
    if rng.random() < 0.2:
        template = rng.choice(FRAMES).replace("{q}", template)
    text = punctuate(rng, damage(rng, template), mark)
    for key, value in fields.items():
        text = text.replace("{" + key + "}", value)
    return text
