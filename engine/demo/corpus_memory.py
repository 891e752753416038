"""Telling facts and asking for them again: what the model learns to copy from."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from penstock.engine.demo.corpus_texts import phrases
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


_SAMPLES: dict[str, Callable[[random.Random], str]] = {
    "name": proper_name,
    "city": lambda rng: proper_name(rng, KNOWN_CITIES),
    "colour": lambda rng: choose_or_invent(rng, COLOURS),
    "number": number_text,
    "age": lambda rng: str(rng.randint(4, 99)),
    "job": lambda rng: choose_or_invent(rng, JOBS),
    "food": lambda rng: choose_or_invent(rng, FOODS),
    "pet": proper_name,
    "own": lambda rng: choose_or_invent(rng, WORDS),
    "given": lambda rng: choose_or_invent(rng, WORDS) if rng.random() < 0.7 else number_text(rng),
}


def _read_fact(name: str, sample: Callable[[random.Random], str], *, has_keys: bool) -> Fact:
    (state,), (unknown,) = phrases("facts", f"{name}.state"), phrases("facts", f"{name}.unknown")
    return Fact(
        sample,
        phrases("facts", f"{name}.tell"),
        phrases("facts", f"{name}.ask"),
        state,
        unknown,
        phrases("facts", f"{name}.keys") if has_keys else ("",),
    )


FACTS = {
    name: _read_fact(name, sample, has_keys=name in ("pet", "own", "given"))
    for name, sample in _SAMPLES.items()
}
MAX_LISTED = 6
ASK_AT_ONCE = 0.06
WEIGHTS = (30, 22, 9, 10, 5, 5, 5, 10, 10, 10)
ASK_EVERYTHING = phrases("facts", "ask_everything")
ASIDES = phrases("facts", "asides")
CORRECTIONS = phrases("facts", "corrections")


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
