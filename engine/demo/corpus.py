"""Conversations: acts strung together from a seed, and their rendering as token ids.

The same seed gives the same conversations.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from penstock.engine.demo.corpus_answers import sample_question
from penstock.engine.demo.corpus_json import write_json
from penstock.engine.demo.corpus_memory import FACTS, ask, tell, tell_several
from penstock.engine.demo.corpus_skills import (
    add_up,
    count,
    count_far,
    count_near,
    go_on,
    repeat,
    spell,
    tell_story,
)
from penstock.engine.demo.corpus_smalltalk import SYSTEM_PROMPTS, greet, small_talk, unknown
from penstock.engine.demo.corpus_turns import State, Turn, type_out

BEGIN, SYSTEM, USER, ASSISTANT, END = SPECIAL_TOKENS = (
    "<|begin|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
)
Act = Callable[[random.Random, State], Turn]


def answer(rng: random.Random, state: State) -> Turn:
    """Ask one of the questions with one right answer."""
    del state
    question, reply = sample_question(rng)
    return Turn(type_out(rng, question, "?"), reply)


WEIGHTS: dict[Act, float] = {
    answer: 27.0,
    tell: 15.0,
    ask: 20.0,
    spell: 14.0,
    count: 5.0,
    repeat: 5.0,
    small_talk: 6.0,
    unknown: 6.0,
    add_up: 3.0,
    tell_story: 2.2,
    go_on: 0.5,
}


@dataclass(frozen=True, slots=True)
class Mixture:
    """How often each act comes, and whether facts use the held-out phrasings too."""

    weights: dict[Act, float]
    uses_all_phrases: bool = False
    has_asides: bool = False


EARLY = Mixture(WEIGHTS)
# Spelling is learned last: the letters of every token must be known first.
LATE = Mixture({**WEIGHTS, spell: 40.0})
# By now no phrasing of a fact is missing; new ones are in `evaluate`.
LAST = Mixture({**WEIGHTS, spell: 40.0}, uses_all_phrases=True)
# What was still weak after the first round: counting far, several facts at once, sums.
SECOND_ROUND = Mixture(
    {
        **WEIGHTS,
        answer: 30.0,
        spell: 20.0,
        unknown: 12.0,
        add_up: 12.0,
        tell_several: 8.0,
        count_far: 18.0,
        tell_story: 1.0,
    },
    uses_all_phrases=True,
    has_asides=True,
)
# And after the second: small numbers in whole sentences, small talk, names again.
THIRD_ROUND = Mixture(
    {
        **WEIGHTS,
        tell: 18.0,
        ask: 26.0,
        count_near: 10.0,
        count_far: 4.0,
        small_talk: 12.0,
        unknown: 12.0,
        tell_several: 5.0,
    },
    uses_all_phrases=True,
    has_asides=True,
)
# Last, JSON, with everything before it so as not to forget it.
FOURTH_ROUND = Mixture(
    {**THIRD_ROUND.weights, spell: 24.0, count_near: 14.0, count_far: 8.0, write_json: 55.0},
    uses_all_phrases=True,
    has_asides=True,
)


@dataclass(slots=True)
class Conversation:
    """A system prompt, if any, and turns."""

    system: str | None = None
    turns: list[Turn] = field(default_factory=list)


def _system_prompt(rng: random.Random, state: State) -> str | None:
    """Return none, a usual prompt, or one that states something about the user."""
    kind = rng.random()
    if kind < 0.6:
        return None
    prompt = rng.choice(SYSTEM_PROMPTS)
    if kind < 0.9:
        return prompt
    fact = rng.choice(("name", "city"))
    value = FACTS[fact].sample(rng)
    state.facts[f"{fact}:"] = FACTS[fact].state.replace("{v}", value)
    if fact == "name":
        state.name = value
        return f"{prompt} The user's name is {value}."
    return f"{prompt} The user lives in {value}."


def _next_act(rng: random.Random, state: State, mixture: Mixture) -> Act:
    if state.rest is not None and rng.random() < 0.8:
        return go_on
    if not state.turns and rng.random() < 0.2:
        return greet
    chosen = rng.choices(list(mixture.weights), list(mixture.weights.values()))[0]
    return answer if chosen is tell_story and not state.can_be_long else chosen


def converse(rng: random.Random, num_characters: int, *, mixture: Mixture = EARLY) -> Conversation:
    """Return a conversation of at least that many characters."""
    state = State(
        can_be_long=num_characters > 1200,
        uses_all_phrases=mixture.uses_all_phrases,
        has_asides=mixture.has_asides,
    )
    conversation = Conversation(system=_system_prompt(rng, state))
    length = 0
    while length < num_characters:
        act = _next_act(rng, state, mixture)
        if act is not go_on and not (state.turns and state.turns[-1].is_cut):
            state.rest = None
        turn = act(rng, state)
        if not turn.is_cut:
            state.rest = None
        state.turns.append(turn)
        length += len(turn.user) + len(turn.assistant)
    conversation.turns = state.turns
    return conversation


def texts(seed: int, num_conversations: int) -> Iterator[str]:
    """Yield the plain text of conversations: what the tokenizer is trained on."""
    rng = random.Random(seed)
    for _ in range(num_conversations):
        for turn in converse(rng, 2000).turns:
            yield turn.user
            yield turn.assistant


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Return the id of a token that must exist."""
    found = tokenizer.token_to_id(token)
    assert found is not None, token
    return int(found)


class Encoder:
    """Renders conversations as token ids, and marks those to be learned."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids = {token: token_id(tokenizer, token) for token in SPECIAL_TOKENS}

    def prompt(self, conversation: Conversation, user: str) -> list[int]:
        """Return the token ids up to where the answer to `user` begins."""
        token_ids, _ = self.encode(conversation)
        return [
            *token_ids,
            self._ids[USER],
            *self._text(user),
            self._ids[END],
            self._ids[ASSISTANT],
        ]

    def encode(self, conversation: Conversation) -> tuple[list[int], list[bool]]:
        """Return token ids, and for each whether it is part of an answer to learn."""
        token_ids = [self._ids[BEGIN]]
        is_learned = [False]

        def add(
            role: str, content: str, *, learns_text: bool, learns_end: bool, num_given: int = 0
        ) -> None:
            text = self._tokenizer.encode(content.strip(), add_special_tokens=False)
            token_ids.extend((self._ids[role], *text.ids, self._ids[END]))
            learned = [learns_text and first >= num_given for first, _ in text.offsets]
            is_learned.extend((False, *learned, learns_end))

        if conversation.system is not None:
            add(SYSTEM, conversation.system, learns_text=False, learns_end=False)
        for turn in conversation.turns:
            add(USER, turn.user, learns_text=False, learns_end=False)
            add(
                ASSISTANT,
                turn.assistant,
                learns_text=True,
                learns_end=not turn.is_cut,
                num_given=turn.num_given,
            )
        return token_ids, is_learned

    def _text(self, text: str) -> list[int]:
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return token_ids
