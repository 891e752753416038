"""Measures a checkpoint on what training never showed: `python -m penstock.engine.demo.evaluate`.

An answer counts only if greedy decoding would give it exactly, to its end. One forward pass
tells: each token of the expected answer must be the likeliest after those before it.
"""

import argparse
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from penstock.engine.demo.corpus import THOUGHTS, Conversation, Encoder, answer
from penstock.engine.demo.corpus_answers import is_held_out, topics
from penstock.engine.demo.corpus_memory import CORRECTIONS, FACTS, Fact, sentence, tell_several
from penstock.engine.demo.corpus_skills import (
    COUNT_FROM,
    COUNT_TO,
    SPELL,
    add_up,
    corpus_words,
    counted,
    letters,
    spell,
)
from penstock.engine.demo.corpus_smalltalk import UNKNOWN, UNKNOWN_QUESTIONS, small_talk, unknown
from penstock.engine.demo.corpus_tools import (
    CALCULATOR,
    CLOCK,
    NOTE,
    part_of,
    response,
    thought_about,
    written,
)
from penstock.engine.demo.corpus_turns import State, Turn, phrase, test_split, type_out
from penstock.engine.demo.corpus_words import WORDS, invented_word, proper_name
from penstock.engine.demo.network import Network, NetworkConfig
from penstock.engine.model_files.resolve import DEMO_MODEL_PATH

FILLERS = (answer, answer, spell, small_talk, unknown, add_up)
REAL_WORDS = (
    "umbrella", "dolphin", "sunflower", "cathedral", "pineapple", "avalanche", "biscuit",
    "lantern", "harvest", "whisper", "compass", "glacier", "parrot", "saxophone", "velvet",
    "walnut", "trumpet", "sailor", "ribbon", "pumpkin", "meadow", "magnet", "lobster", "kitten",
    "jungle", "insect", "hammer", "feather", "dragon", "cactus", "blanket", "almond", "wizard",
    "tunnel", "silver", "rocket", "puzzle", "ocelot", "needle", "marble",
)  # fmt: skip
NEW_ASKS = {
    "name": (
        "could you tell me my name", "please tell me what my name is", "what was my name",
        "i forgot my name, what is it", "do you happen to remember my name", "can you say my name",
    ),
    "city": (
        "can you tell me which city i live in", "what was my city", "do you remember my city",
        "in which town do i live", "tell me my city", "do you know which city i am from",
    ),
    "colour": ("which colour is my favourite", "can you tell me my favorite color",
               "do you know my favourite colour"),
    "number": ("can you tell me my number", "what number did i tell you", "what's my number",
               "do you know my lucky number"),
    "age": ("do you know my age", "tell me how old i am", "tell me my age"),
    "job": ("do you know my job", "can you tell me my job", "what job do i have"),
    "food": ("do you know my favourite food", "tell me my favorite food", "which food do i like"),
    "pet": ("can you tell me the name of my {k}", "how did i call my {k}",
            "do you remember what my {k} is called"),
    "own": ("can you tell me my {k}", "do you still know my {k}", "which is my {k}"),
    "given": ("can you tell me the {k}", "do you know the {k}", "what was the {k} again"),
}  # fmt: skip
Case = tuple[Conversation, Turn]
Suite = Callable[[random.Random], Iterator[Case]]
JOBS = (CALCULATOR, CLOCK, NOTE)
THREE_TOOLS = ("calculator(expression)", "clock(city)", "note(text)")


def fill(rng: random.Random, conversation: Conversation, state: State, num_turns: int) -> None:
    """Let other things be talked about."""
    for _ in range(num_turns):
        state.turns.append(rng.choice(FILLERS)(rng, state))
    conversation.turns = state.turns


def held_out_answers(rng: random.Random, *, num_before: int) -> Iterator[Case]:
    """Ask every question phrasing that was held out."""
    for topic in topics():
        for question in topic.held_out_questions:
            conversation = Conversation()
            fill(rng, conversation, State(), num_before)
            yield conversation, Turn(type_out(rng, question, "?"), topic.answer)


def recalled(
    rng: random.Random, kind: str, *, num_between: int, is_corrected: bool = False
) -> Case:
    """Tell a fact, talk about other things, and ask for it in new words."""
    fact, state, conversation = FACTS[kind], State(), Conversation()
    key = rng.choice([k for k in fact.keys if k != "?"])
    value = ""
    for number in range(2 if is_corrected else 1):
        value = fact.sample(rng)
        told = rng.choice(fact.tell).replace("{k}", key).replace("{v}", value)
        state.turns.append(_acknowledged(rng, fact, key, told, value, is_first=number == 0))
        if kind == "name":
            state.name = value
        fill(rng, conversation, state, num_between)
    question = rng.choice(NEW_ASKS[kind]).replace("{k}", key)
    clause = fact.state.replace("{k}", key).replace("{v}", value)
    return conversation, Turn(type_out(rng, question, "?"), sentence(clause))


def _acknowledged(
    rng: random.Random, fact: Fact, key: str, told: str, value: str, *, is_first: bool
) -> Turn:
    clause = fact.state.replace("{k}", key).replace("{v}", value)
    if not is_first:
        return Turn(phrase(rng, CORRECTIONS, ".", t=told), f"All right, now {clause}.")
    if fact is FACTS["name"]:
        return Turn(f"{told}.", f"Nice to meet you, {value}!")
    return Turn(f"{told}.", f"I will remember that {clause}.")


def spelled(rng: random.Random, word: str) -> Case:
    """Spell a word, asked for in any trained way."""
    return Conversation(), Turn(
        phrase(rng, SPELL, w=word), f"The word {word} is spelled {letters(word)}."
    )


def held_out_words(rng: random.Random, count: int) -> Iterator[str]:
    """Yield invented words that training refused to spell."""
    while count:
        word = invented_word(rng)
        if is_held_out(word) and word not in WORDS:
            count -= 1
            yield word


def counting(rng: random.Random) -> Iterator[Case]:
    """Count to every number up to 100, and between a hundred pairs."""
    for last in range(1, 101):
        user = phrase(rng, COUNT_TO, "", b=str(last))
        yield Conversation(), Turn(user, counted(1, last))
    for _ in range(100):
        first = rng.randint(0, 60)
        last = first + rng.randint(1, 40)
        user = phrase(rng, COUNT_FROM, "", a=str(first), b=str(last))
        yield Conversation(), Turn(user, counted(first, last))


def unknown_questions(rng: random.Random) -> Iterator[Case]:
    """Ask what the model cannot know, in phrasings that were held out."""
    for template in test_split(UNKNOWN_QUESTIONS):
        for _ in range(10):
            fields = {
                "n": proper_name(rng),
                "w": rng.choice(REAL_WORDS),
                "x": invented_word(rng),
                "c": rng.choice(REAL_WORDS),
                "d": str(rng.randint(21, 2100)),
            }
            yield Conversation(), Turn(type_out(rng, template, "?", **fields), UNKNOWN)


def called(rng: random.Random, job: str, *, num_before: int) -> Case:
    """Ask for what a tool does, among the three of the card."""
    conversation, state = Conversation(tools=THREE_TOOLS), State(tools=THREE_TOOLS)
    fill(rng, conversation, state, num_before)
    user, call, _, _ = part_of(rng, state, job)
    return conversation, Turn(user, written(call))


def answered(rng: random.Random, job: str) -> Case:
    """Give a tool's result."""
    conversation, state = Conversation(tools=THREE_TOOLS), State(tools=THREE_TOOLS)
    user, call, result, reply = part_of(rng, state, job)
    conversation.turns = [Turn(user, written(call))]
    return conversation, Turn(response(result), reply)


def not_called(rng: random.Random) -> Case:
    """Ask what needs no tool, with tools at hand."""
    conversation = Conversation(tools=THREE_TOOLS)
    return conversation, rng.choice((answer, answer, spell, small_talk))(rng, State())


def thought(rng: random.Random) -> Case:
    """Ask for a thought before the answer."""
    act = rng.choice((answer, spell, small_talk))
    turn = act(rng, State())
    return Conversation(thinks=True), replace(turn, thought=THOUGHTS[act])


def thought_call(rng: random.Random) -> Case:
    """Ask for a thought before a call."""
    state = State(tools=THREE_TOOLS)
    user, call, _, _ = part_of(rng, state, rng.choice(JOBS))
    conversation = Conversation(tools=THREE_TOOLS, thinks=True)
    return conversation, Turn(user, written(call), thought=thought_about(call))


def _times(number: int, case: Callable[..., Case], *arguments: str, **options: int) -> Suite:
    return lambda rng: (case(rng, *arguments, **options) for _ in range(number))


SUITES: dict[str, Suite] = {
    "questions in held-out words, first turn": lambda rng: held_out_answers(rng, num_before=0),
    "questions in held-out words, sixth turn": lambda rng: held_out_answers(rng, num_before=5),
    "a name, asked for at once": lambda rng: (
        recalled(rng, "name", num_between=0) for _ in range(200)
    ),
    "a name, 5 turns later": lambda rng: (recalled(rng, "name", num_between=5) for _ in range(200)),
    "a city, 5 turns later": lambda rng: (recalled(rng, "city", num_between=5) for _ in range(200)),
    "a number, 5 turns later": lambda rng: (
        recalled(rng, "number", num_between=5) for _ in range(200)
    ),
    "any fact, 5 turns later": lambda rng: (
        recalled(rng, rng.choice(list(FACTS)), num_between=5) for _ in range(200)
    ),
    "a corrected name, 3 turns later": lambda rng: (
        recalled(rng, "name", num_between=3, is_corrected=True) for _ in range(200)
    ),
    "a name, 30 turns later": lambda rng: (
        recalled(rng, "name", num_between=30) for _ in range(60)
    ),
    "spelling real words not in the corpus": lambda rng: (
        spelled(rng, w) for w in REAL_WORDS if w not in corpus_words()
    ),
    "spelling invented words": lambda rng: (spelled(rng, w) for w in held_out_words(rng, 200)),
    "counting": counting,
    "sums up to 20": lambda rng: ((Conversation(), add_up(rng, State())) for _ in range(200)),
    "two to four facts told at once": lambda rng: (
        (Conversation(), tell_several(rng, State())) for _ in range(200)
    ),
    "unknown things, in held-out words": unknown_questions,
    **{f"a call of {job}": _times(200, called, job, num_before=0) for job in JOBS},
    **{f"a call of {job}, fourth turn": _times(200, called, job, num_before=3) for job in JOBS},
    **{f"the answer from a result of {job}": _times(200, answered, job) for job in JOBS},
    "no call, though tools are offered": _times(200, not_called),
    "a thought and the answer": _times(200, thought),
    "a thought and a call": _times(200, thought_call),
}


class Judge:
    """A network that says whether it would give exactly the expected answer."""

    def __init__(self, folder: Path) -> None:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.encoder = Encoder(tokenizer)
        self.config = NetworkConfig(vocab_size=tokenizer.get_vocab_size())
        self._network = Network(self.config)
        weights = load_file(folder / "model.safetensors")
        self._network.load_state_dict({name: w.float() for name, w in weights.items()})

    @torch.inference_mode()
    def would_answer(self, conversation: Conversation, turn: Turn) -> bool | None:
        """Return whether greedy decoding gives the answer; None beyond the context."""
        prompt = self.encoder.prompt(conversation, turn.user)
        whole = replace(conversation, turns=[*conversation.turns, turn])
        token_ids = self.encoder.encode(whole)[0]
        if len(token_ids) > self.config.max_position_embeddings:
            return None
        hidden = self._network(torch.tensor([token_ids[:-1]]))[0, len(prompt) - 1 :]
        chosen = self._network.logits(hidden).argmax(dim=-1)
        return bool((chosen == torch.tensor(token_ids[len(prompt) :])).all())


def evaluate(
    folder: Path, *, seed: int, only: str = "", shows_failures: bool = False
) -> dict[str, str]:
    """Return, per suite whose name contains `only`, the share of exact answers as text."""
    judge, figures = Judge(folder), {}
    for name, suite in SUITES.items():
        if only not in name:
            continue
        outcomes = []
        for conversation, turn in suite(random.Random(f"{seed} {name}")):
            outcome = judge.would_answer(conversation, turn)
            outcomes += [] if outcome is None else [outcome]
            if outcome is False and shows_failures:
                print(f"  missed: {turn.user!r} -> {turn.assistant!r}")
        figures[name] = f"{sum(outcomes)} of {len(outcomes)} ({sum(outcomes) / len(outcomes):.1%})"
        print(f"{name}: {figures[name]}", flush=True)
    return figures


def main() -> None:
    """Read the command line and evaluate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL_PATH)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="run the suites whose name contains this")
    parser.add_argument("--show-failures", action="store_true")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    figures = evaluate(
        arguments.model,
        seed=arguments.seed,
        only=arguments.only,
        shows_failures=arguments.show_failures,
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
