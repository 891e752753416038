"""Small talk with fixed answers, and the honest answer to everything unknown."""

import random

from penstock.engine.demo.corpus_texts import groups, phrases
from penstock.engine.demo.corpus_turns import State, Turn, phrase
from penstock.engine.demo.corpus_words import WORDS, choose_or_invent, invented_word, proper_name

UNKNOWN = "I am a small demo model, and I do not know that. Ask me about penstock or LLM serving."
GREETINGS = phrases("small_talk", "greetings")
FAREWELLS = phrases("small_talk", "farewells")
TALK = tuple(
    (questions, answer.removeprefix("= ")) for *questions, answer in groups("small_talk", "talk")
)
UNKNOWN_QUESTIONS = phrases("small_talk", "unknown_questions")
SYSTEM_PROMPTS = phrases("small_talk", "system_prompts")


def greet(rng: random.Random, state: State) -> Turn:
    """Say hello, by name where the name is known."""
    user = phrase(rng, GREETINGS, rng.choice(("!", ".", "")))
    if state.name:
        return Turn(user, f"Hello, {state.name}! How can I help you?")
    return Turn(user, "Hello! I am the penstock demo model. How can I help you?")


def part(rng: random.Random, state: State) -> Turn:
    """Say goodbye, by name where the name is known."""
    user = phrase(rng, FAREWELLS, ".")
    return Turn(user, f"Goodbye, {state.name}!" if state.name else "Goodbye! Come back soon.")


def small_talk(rng: random.Random, state: State) -> Turn:
    """Exchange a pleasantry, or one of the few things known by heart."""
    kind = rng.random()
    if kind < 0.2:
        return greet(rng, state)
    if kind < 0.3:
        return part(rng, state)
    phrases, answer = rng.choice(TALK)
    return Turn(phrase(rng, phrases, rng.choice(("?", ".", "!", ""))), answer)


def unknown(rng: random.Random, state: State) -> Turn:
    """Ask for what the model does not know."""
    del state
    fields = {
        "n": proper_name(rng),
        "w": choose_or_invent(rng, WORDS),
        "x": invented_word(rng),
        "c": choose_or_invent(rng, WORDS),
        "d": str(rng.randint(21, 2100)),
    }
    if rng.random() < 0.08:
        words = (choose_or_invent(rng, WORDS) for _ in range(rng.randint(1, 7)))
        return Turn(" ".join(words), UNKNOWN)
    return Turn(phrase(rng, UNKNOWN_QUESTIONS, **fields), UNKNOWN)
