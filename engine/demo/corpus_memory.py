"""Telling facts and asking for them again: what the model learns to copy from.

Knows nothing of how a conversation is put together.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from penstock.engine.demo.corpus_turns import State, Turn, phrase, type_out
from penstock.engine.demo.corpus_words import (
    COLOURS,
    FOODS,
    JOBS,
    KNOWN_CITIES,
    WORDS,
    choose_or_invent,
    damage,
    invented_word,
    number_text,
    proper_name,
    punctuate,
)


@dataclass(frozen=True, slots=True)
class Fact:
    """A kind of fact: how it is told, asked for and stated; `{v}` is its value, `{k}` its key."""

    sample: Callable[[random.Random], str]
    tell: tuple[str, ...]
    ask: tuple[str, ...]
    state: str
    unknown: str
    keys: tuple[str, ...] = ("",)


FACTS: dict[str, Fact] = {
    "name": Fact(
        proper_name,
        (
            "my name is {v}", "i am {v}", "i'm {v}", "call me {v}", "you can call me {v}",
            "hi, i'm {v}", "hello, my name is {v}", "hello, i am {v}", "people call me {v}",
            "{v} is my name", "the name is {v}", "hi, {v} here", "i am called {v}", "this is {v}",
            "my friends call me {v}", "hey, it's {v}", "my name's {v}", "please call me {v}",
            "hi there, my name is {v}", "let me introduce myself: i am {v}",
        ),
        (
            "what is my name", "what's my name", "who am i", "do you remember my name",
            "do you know my name", "tell me my name", "what am i called", "say my name",
            "can you tell me my name", "how am i called", "my name", "what did i say my name was",
            "do you still know my name", "what was my name again", "do you know who i am",
            "which name did i tell you", "did i tell you my name", "remind me of my name",
        ),
        "your name is {v}",
        "your name",
    ),
    "city": Fact(
        lambda rng: proper_name(rng, KNOWN_CITIES),
        (
            "i live in {v}", "i am from {v}", "i come from {v}", "my city is {v}", "i'm from {v}",
            "my home is {v}", "i'm living in {v}", "my home town is {v}", "i live near {v}",
            "my hometown is {v}", "i moved to {v}", "i am in {v}", "{v} is where i live",
            "i was born in {v}", "i live in a town called {v}", "i am a citizen of {v}",
        ),
        (
            "where do i live", "where am i from", "which city do i live in", "what is my city",
            "what city am i from", "what's my city", "do you remember where i live",
            "in which city do i live",
            "where is my home", "what is my home town", "do you know where i live",
            "where do i come from",
            "can you tell me where i live", "which town am i from", "tell me where i live",
            "what's my hometown",
            "where did i say i live", "what was my city again",
        ),
        "your city is {v}",
        "your city",
    ),
    "colour": Fact(
        lambda rng: choose_or_invent(rng, COLOURS),
        (
            "my favourite colour is {v}", "my favorite color is {v}", "i like the colour {v}",
            "i love the color {v}", "the colour i like most is {v}", "{v} is my favourite colour",
            "my favorite colour is {v}", "{v} is my favorite color", "my best colour is {v}",
        ),
        (
            "what is my favourite colour", "what is my favorite color", "which colour do i like",
            "what's my favourite colour", "do you remember my favourite colour",
            "my favorite color",
            "which color do i like most", "do you know my favorite color", "what colour do i love",
            "tell me my favourite colour", "what's my favorite color",
            "what was my favourite colour",
        ),
        "your favourite colour is {v}",
        "your favourite colour",
    ),
    "number": Fact(
        number_text,
        (
            "my lucky number is {v}", "my favourite number is {v}", "remember the number {v}",
            "my number is {v}", "my favorite number is {v}", "{v} is my lucky number",
            "please remember the number {v}", "the number is {v}", "keep the number {v} in mind",
        ),
        (
            "what is my lucky number", "what is my number", "what was the number",
            "what is my favourite number", "which number did i tell you",
            "do you remember my number",
            "what's my lucky number", "what's my favorite number",
            "which number should you remember",
            "tell me my number", "do you remember the number", "what number did i give you",
        ),
        "your number is {v}",
        "your number",
    ),
    "age": Fact(
        lambda rng: str(rng.randint(4, 99)),
        (
            "i am {v} years old", "i'm {v} years old", "my age is {v}", "i am {v}", "i turned {v}",
            "i'm {v}", "i just turned {v}",
        ),
        (
            "how old am i", "what is my age", "do you know how old i am", "what's my age",
            "do you remember my age", "can you tell me how old i am",
        ),
        "you are {v} years old",
        "your age",
    ),
    "job": Fact(
        lambda rng: choose_or_invent(rng, JOBS),
        ("i work as a {v}", "my job is {v}", "i am a {v}", "i'm a {v}", "i earn my money as a {v}"),
        (
            "what is my job", "what do i do for a living", "what do i work as", "what's my job",
            "do you remember my job", "what is my profession", "which job do i have",
        ),
        "your job is {v}",
        "your job",
    ),
    "food": Fact(
        lambda rng: choose_or_invent(rng, FOODS),
        (
            "my favourite food is {v}", "my favorite food is {v}", "i love to eat {v}",
            "i like eating {v}", "{v} is my favourite food", "the food i like most is {v}",
        ),
        (
            "what is my favourite food", "what is my favorite food", "what do i like to eat",
            "what's my favourite food", "which food do i love", "what food do i like",
            "do you remember my favorite food", "what do i love to eat",
        ),
        "your favourite food is {v}",
        "your favourite food",
    ),
    "pet": Fact(
        proper_name,
        (
            "my {k} is called {v}", "i have a {k} named {v}", "my {k}'s name is {v}",
            "i have a {k} called {v}", "the name of my {k} is {v}", "my {k} is named {v}",
        ),
        (
            "what is my {k} called", "what is the name of my {k}", "what's my {k}'s name",
            "do you remember the name of my {k}", "how is my {k} called", "what did i call my {k}",
            "what is my {k}'s name", "do you know my {k}'s name", "tell me the name of my {k}",
        ),
        "your {k} is called {v}",
        "the name of your {k}",
        ("dog", "cat", "horse", "sister", "brother", "son", "daughter", "friend", "boss", "bird"),
    ),
    "own": Fact(
        lambda rng: choose_or_invent(rng, WORDS),
        ("my {k} is {v}", "{v} is my {k}", "remember that my {k} is {v}",
         "note that my {k} is {v}"),
        ("what is my {k}", "what's my {k}", "do you remember my {k}", "tell me my {k}", "my {k}",
         "do you know my {k}", "what was my {k} again"),
        "your {k} is {v}",
        "your {k}",
        ("favourite drink", "favourite book", "favourite animal", "hobby", "favorite movie", "team",
         "favourite song", "favourite season", "plan", "favourite game", "email", "car", "?"),
    ),
    "given": Fact(
        lambda rng: choose_or_invent(rng, WORDS) if rng.random() < 0.7 else number_text(rng),
        ("the {k} is {v}", "remember: the {k} is {v}", "remember that the {k} is {v}",
         "please remember the {k} {v}", "{v} is the {k}"),
        ("what is the {k}", "what's the {k}", "do you remember the {k}", "what was the {k}",
         "tell me the {k}", "which {k} did i tell you", "can you repeat the {k}"),
        "the {k} is {v}",
        "the {k}",
        ("secret word", "password", "code word", "code", "magic word", "secret number", "key",
         "room number", "secret", "?"),
    ),
}  # fmt: skip
MAX_LISTED = 6
ASK_AT_ONCE = 0.06
WEIGHTS = (30, 22, 9, 10, 5, 5, 5, 10, 10, 10)
ASK_EVERYTHING = (
    "what do you know about me", "what did i tell you about me", "what do you remember about me",
    "tell me everything you know about me", "summarize what you know about me",
    "what have i told you",
    "what do you remember", "list all you know about me", "who am i and what do you know about me",
)  # fmt: skip
ASIDES = (
    "please remember it", "please remember that", "remember that", "remember it", "remember this",
    "don't forget it", "please don't forget that", "can you remember that", "keep that in mind",
    "please keep it in mind", "I will ask you later", "do not forget", "got it", "ok", "okay",
    "can you remember this for me", "nice to meet you", "how are you", "and you", "please",
)  # fmt: skip
CORRECTIONS = (
    "actually, {t}", "sorry, {t}", "no, {t}", "correction: {t}", "i was wrong, {t}", "wait, {t}",
    "i made a mistake: {t}", "from now on {t}", "that has changed: {t}", "{t} now",
)  # fmt: skip


def sentence(text: str) -> str:
    """Make a clause a sentence."""
    return text[:1].upper() + text[1:] + "."


def choose_fact(rng: random.Random) -> tuple[str, str, Fact]:
    """Return a fact's identity, the word for its key, and its kind."""
    kind = rng.choices(list(FACTS), WEIGHTS)[0]
    fact = FACTS[kind]
    key = rng.choice(fact.keys)
    if key == "?":
        key = rng.choice((f"favourite {invented_word(rng)}", rng.choice(WORDS), invented_word(rng)))
    return f"{kind}:{key}", key, fact


def _learn(rng: random.Random, state: State) -> tuple[str, str, bool, str | None]:
    """Invent a fact and enter it; return how it is told, its clause, if it is news, and a name."""
    identity, key, fact = choose_fact(rng)
    value = fact.sample(rng)
    is_new = identity not in state.facts
    told = (
        damage(rng, rng.choice(state.usable(fact.tell))).replace("{k}", key).replace("{v}", value)
    )
    clause = fact.state.replace("{k}", key).replace("{v}", value)
    state.facts[identity] = clause
    is_name = identity == "name:"
    if is_name:
        state.name = value
    return told, clause, is_new, value if is_name else None


def tell(rng: random.Random, state: State) -> Turn:
    """The user states one to four facts, new ones or corrections."""
    return _tell(rng, state, rng.choices((1, 2, 3, 4), (70, 20, 7, 3))[0])


def tell_several(rng: random.Random, state: State) -> Turn:
    """The user states two to four facts at once."""
    return _tell(rng, state, rng.randint(2, 4))


def _with_aside(rng: random.Random, state: State, user: str) -> str:
    """Let the user add, now and then, that what was told is to be remembered."""
    if not state.has_asides or rng.random() < 0.6:
        return user
    joint = " " if user[-1:] in ".!?" else rng.choice((". ", ", ", " "))
    return user + joint + punctuate(rng, rng.choice(ASIDES), ".")


def _tell(rng: random.Random, state: State, count: int) -> Turn:
    learned = [_learn(rng, state) for _ in range(count)]
    if count > 1:
        joint = rng.choice((" and ", ", ", ". ", ", and "))
        mask = {f"t{i}": told for i, (told, *_) in enumerate(learned)}
        user = type_out(rng, joint.join("{" + key + "}" for key in mask), ".", **mask)
        known = dict.fromkeys(clause for _, clause, _, _ in learned)
        stated = [c for c in known if c in state.facts.values()]
        return Turn(
            _with_aside(rng, state, user), f"Thank you, I will remember: {', '.join(stated)}."
        )
    told, clause, is_new, name = learned[0]
    if rng.random() < ASK_AT_ONCE:
        question, reply = _question(rng, state)
        return Turn(f"{told}. {damage(rng, question)}?", reply)
    if is_new:
        user = _with_aside(rng, state, type_out(rng, "{t}", ".", t=told))
        return Turn(
            user, f"Nice to meet you, {name}!" if name else f"I will remember that {clause}."
        )
    user = phrase(rng, CORRECTIONS, ".", t=told) if rng.random() < 0.8 else told
    return Turn(user, f"All right, now {clause}.")


def _question(rng: random.Random, state: State) -> tuple[str, str]:
    """Return a question for a fact, usually a known one, and its answer."""
    known = list(state.facts)
    if known and rng.random() < 0.85:
        identity = rng.choice(known)
        kind, _, key = identity.partition(":")
        fact = FACTS[kind]
    else:
        identity, key, fact = choose_fact(rng)
    question = rng.choice(state.usable(fact.ask)).replace("{k}", key)
    if identity in state.facts:
        return question, sentence(state.facts[identity])
    return question, f"You have not told me {fact.unknown.replace('{k}', key)} yet."


def ask(rng: random.Random, state: State) -> Turn:
    """The user asks for one or two facts, or for all of them."""
    kind = rng.random()
    if kind < 0.06 and len(state.facts) <= MAX_LISTED:
        answer = " ".join(sentence(clause) for clause in state.facts.values())
        answer = answer or "You have not told me anything about yourself yet."
        return Turn(phrase(rng, ASK_EVERYTHING), answer)
    question, answer = _question(rng, state)
    if kind < 0.2:
        second, second_answer = _question(rng, state)
        if second_answer != answer:
            question, answer = f"{question} and {second}", f"{answer} {second_answer}"
    return Turn(type_out(rng, question, "?"), answer)
