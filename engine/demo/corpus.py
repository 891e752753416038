"""Conversations: acts strung together from a seed, and their rendering as token ids.

The same seed gives the same conversations.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

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
from penstock.engine.demo.corpus_tools import CALCULATOR, jobs_of, offer, use_tool
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
    tools_share: float = 0.0  # of conversations that have tools
    thoughts_share: float = 0.0  # of those that think


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
# And tool calls and thoughts, in conversations that offer tools or ask for thoughts.
FIFTH_ROUND = Mixture(
    {**FOURTH_ROUND.weights, write_json: 45.0, use_tool: 170.0},
    uses_all_phrases=True,
    has_asides=True,
    tools_share=0.5,
    thoughts_share=0.22,
)
# Names and the ends of JSON once more, which the fifth round had made worse.
SIXTH_ROUND = Mixture(
    {**FIFTH_ROUND.weights, tell: 30.0, ask: 36.0, unknown: 16.0, write_json: 75.0},
    uses_all_phrases=True,
    has_asides=True,
    tools_share=0.42,
    thoughts_share=0.22,
)
THINK = "Think first."
# What is thought before an answer, by the act; others get none.
THOUGHTS: dict[Act, str] = {
    answer: "I know this.",
    tell: "I remember this.",
    tell_several: "I remember this.",
    ask: "I look back for this.",
    spell: "I spell it.",
    count: "I count.",
    count_near: "I count.",
    count_far: "I count.",
    repeat: "I repeat it.",
    small_talk: "This is small talk.",
    greet: "This is a greeting.",
    unknown: "I do not know this.",
    add_up: "I add up.",
    tell_story: "I tell a story.",
}


@dataclass(slots=True)
class Conversation:
    """A system prompt, if any, the tools that are offered, and turns.

    Attributes:
        thinks: thoughts are asked for.
        keeps_thoughts: those of earlier turns are in the prompt.
    """

    system: str | None = None
    turns: list[Turn] = field(default_factory=list)
    tools: tuple[str, ...] = ()
    thinks: bool = False
    keeps_thoughts: bool = True

    @property
    def system_block(self) -> str | None:
        """What the chat template makes of the system prompt, the tools and the wish to think."""
        lines = [] if self.system is None else [self.system]
        if self.tools:
            lines.append(f"Tools: {', '.join(self.tools)}")
        if self.thinks:
            lines.append(THINK)
        return "\n".join(lines) or None


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
    if chosen is use_tool and not jobs_of(state):
        chosen = rng.choices(list(FOURTH_ROUND.weights), list(FOURTH_ROUND.weights.values()))[0]
    if chosen is add_up and any(each.startswith(CALCULATOR) for each in state.tools):
        return use_tool
    return answer if chosen is tell_story and not state.can_be_long else chosen


def converse(rng: random.Random, num_characters: int, *, mixture: Mixture = EARLY) -> Conversation:
    """Return a conversation of at least that many characters."""
    state = State(
        can_be_long=num_characters > 1200,
        uses_all_phrases=mixture.uses_all_phrases,
        has_asides=mixture.has_asides,
    )
    conversation = Conversation(system=_system_prompt(rng, state))
    if mixture.tools_share and rng.random() < mixture.tools_share:
        conversation.tools = state.tools = offer(rng)
    if mixture.thoughts_share and rng.random() < mixture.thoughts_share:
        conversation.thinks, conversation.keeps_thoughts = True, rng.random() < 0.5
    length = 0
    while length < num_characters:
        act = _next_act(rng, state, mixture)
        if act is not go_on and not (state.turns and state.turns[-1].is_cut):
            state.rest = None
        turn = act(rng, state)
        if conversation.thinks and not turn.thought and not turn.num_given and act in THOUGHTS:
            turn = replace(turn, thought=THOUGHTS[act])
        if not turn.is_cut:
            state.rest = None
        state.turns.append(turn)
        length += len(turn.user) + len(turn.assistant)
        length += sum(len(step.assistant) + len(step.results) for step in turn.steps)
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


OPENING = "<think>\n"  # written by the chat template


def thinking(thought: str) -> str:
    """Return a thought as the model writes it before its answer."""
    return f"{OPENING}{thought}\n</think>\n\n"


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
            *self._text(OPENING if conversation.thinks else ""),
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

        system = conversation.system_block
        if system is not None:
            add(SYSTEM, system, learns_text=False, learns_end=False)
        for turn in conversation.turns:
            has_thoughts = conversation.thinks and (
                conversation.keeps_thoughts or turn is conversation.turns[-1]
            )
            # Where thoughts are asked for, an answer without one is not to be learned.
            is_right = has_thoughts == conversation.thinks and (
                not conversation.thinks or bool(turn.thought)
            )
            given = len(OPENING) if has_thoughts else 0
            add(USER, turn.user, learns_text=False, learns_end=False)
            for step in turn.steps:
                text = thinking(step.thought) + step.assistant if has_thoughts else step.assistant
                add(ASSISTANT, text, learns_text=is_right, learns_end=is_right, num_given=given)
                add(USER, step.results, learns_text=False, learns_end=False)
            text = turn.assistant
            if has_thoughts and turn.thought:
                text = thinking(turn.thought) + text
            add(
                ASSISTANT,
                text,
                learns_text=is_right,
                learns_end=is_right and not turn.is_cut,
                num_given=max(turn.num_given, given),
            )
        return token_ids, is_learned

    def _text(self, text: str) -> list[int]:
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return token_ids
