"""The requests of each workload: the same for all rivals, drawn from a seed.

    single          one stream, 128 tokens in and 128 out, one request after the other
    c8, c32         8 and 32 in flight, lognormal lengths
    turns1, turns8  8 conversations of 4 turns over one system prompt, one and eight at a time
    prefill         prompts of 2,000 tokens, one after the other; their tokens count
    front128        128 short streams: on a tiny model, the cost of the front end
    echo, novel     one stream of a model whose text is known (`cycles`): it copies its prompt, or
                    writes what was not there before; 128 tokens in and 128 out

Prompts of single turns are token ids, so that no tokenizer is involved. Conversations use the
chat endpoint and send the answers back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from tokenizers import Tokenizer

from penstock.load.client.records import Dialogue, Endpoint, Turn
from penstock.load.peers import cycles, models

TokenTurns: TypeAlias = list[tuple[list[int], int]]

_MAX_PROMPT_TOKENS, _MAX_OUTPUT_TOKENS = 512, 256
_SYSTEM_TOKENS, _USER_TOKENS = 512, 32


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    endpoint: Endpoint
    concurrency: int
    dialogues: tuple[Dialogue, ...]

    @property
    def num_output_tokens(self) -> int:
        return sum(turn.max_tokens for dialogue in self.dialogues for turn in dialogue.turns)


@dataclass(frozen=True, slots=True)
class Size:
    """How many requests make a cell of some seconds on a model of this size."""

    num_single: int
    num_c8: int
    num_c32: int
    turn_tokens: int  # of each answer in a conversation
    num_front: int = 256


SIZES: Mapping[str, Size] = {
    "T": Size(num_single=8, num_c8=48, num_c32=96, turn_tokens=64),
    "S": Size(num_single=8, num_c8=32, num_c32=64, turn_tokens=32),
    "M": Size(num_single=2, num_c8=12, num_c32=32, turn_tokens=16),
    "GPT2": Size(num_single=4, num_c8=16, num_c32=32, turn_tokens=32),
    "MOE": Size(num_single=8, num_c8=16, num_c32=32, turn_tokens=32),
    "S-cycles": Size(num_single=6, num_c8=32, num_c32=64, turn_tokens=32),
    "M-cycles": Size(num_single=3, num_c8=12, num_c32=32, turn_tokens=16),
}
_SIZE_OF_FILES = Size(num_single=4, num_c8=16, num_c32=32, turn_tokens=32)
_PREFILL_TOKENS = 2000
WORKLOADS = ("single", "c8", "c32", "prefill", "turns1", "turns8", "front128", "echo", "novel")
# What a run without flags asks of each model: the rest would only take time.
DEFAULT_WORKLOADS: Mapping[str, tuple[str, ...]] = {
    "T": ("front128",),
    "S": ("single", "c8", "c32", "turns1", "turns8"),
    "M": ("single", "c8", "c32"),
    "GPT2": ("single", "c8"),
    "MOE": ("single", "c8"),
    "S-cycles": ("echo", "novel"),
    "M-cycles": ("echo", "novel"),
}
WORKLOADS_OF_FILES = ("single", "c8", "c32", "prefill")


def make(name: str, model: str) -> Workload:
    """A workload for a model, the same at every call."""
    draw, size = _Draw(model, name), SIZES.get(model, _SIZE_OF_FILES)
    if name in ("turns1", "turns8"):
        concurrency = int(name.removeprefix("turns"))
        return Workload(name, "chat", concurrency, draw.conversations(8, 4, size.turn_tokens))
    if name in ("c8", "c32"):
        dialogues = draw.lognormal(size.num_c8 if name == "c8" else size.num_c32)
        return Workload(name, "completions", int(name.removeprefix("c")), dialogues)
    if name == "single":
        return Workload(name, "completions", 1, draw.fixed(size.num_single, 128, 128))
    if name == "prefill":
        return Workload(name, "completions", 1, draw.fixed(size.num_single, _PREFILL_TOKENS, 2))
    if name in ("echo", "novel"):
        prompts = cycles.prompts_of(models.word_ids(model), size.num_single, is_echo=name == "echo")
        turns = (Turn(text=tuple(each), max_tokens=128) for each in prompts)
        return Workload(name, "completions", 1, tuple(Dialogue(turns=(turn,)) for turn in turns))
    assert name == "front128", name
    return Workload(name, "completions", 128, draw.fixed(size.num_front, 32, 96))


def warm_up(model: str, concurrency: int) -> Workload:
    """A short workload with tokens of its own, so that no cache finds them again."""
    dialogues = _Draw(model, f"warm {concurrency}").fixed(concurrency, 64, 8)
    return Workload("warm", "completions", concurrency, dialogues)


class _Draw:
    """Dialogues from a generator seeded by model and workload."""

    def __init__(self, model: str, workload: str) -> None:
        self._random = np.random.default_rng(list(f"{model} {workload}".encode()))
        self._model, self._ids = model, models.word_ids(model)

    def fixed(self, num: int, prompt_tokens: int, output_tokens: int) -> tuple[Dialogue, ...]:
        return tuple(self._single(prompt_tokens, output_tokens) for _ in range(num))

    def lognormal(self, num: int) -> tuple[Dialogue, ...]:
        """Prompts of about 160 tokens in the mean, answers of about 128."""
        prompts = self._lengths(num, mean=160, sigma=0.8, largest=_MAX_PROMPT_TOKENS)
        outputs = self._lengths(num, mean=128, sigma=0.5, largest=_MAX_OUTPUT_TOKENS)
        return tuple(self._single(*lengths) for lengths in zip(prompts, outputs, strict=True))

    def conversations(self, num: int, num_turns: int, turn_tokens: int) -> tuple[Dialogue, ...]:
        def turn() -> Turn:
            return Turn(text=self._text(_USER_TOKENS), max_tokens=turn_tokens)

        system = self._text(_SYSTEM_TOKENS)
        turns = (tuple(turn() for _ in range(num_turns)) for _ in range(num))
        return tuple(Dialogue(system=system, turns=each) for each in turns)

    def _single(self, prompt_tokens: int, output_tokens: int) -> Dialogue:
        return Dialogue(turns=(Turn(text=self._tokens(prompt_tokens), max_tokens=output_tokens),))

    def _tokens(self, num: int) -> tuple[int, ...]:
        return tuple(self._random.integers(self._ids.start, self._ids.stop, num).tolist())

    def _text(self, num_tokens: int) -> str:
        words = models.words(self._model)
        return "".join(words[token_id] for token_id in self._tokens(num_tokens))

    def _lengths(self, num: int, *, mean: float, sigma: float, largest: int) -> list[int]:
        mu = math.log(mean) - sigma * sigma / 2
        drawn = self._random.lognormal(mu, sigma, num)
        lengths: list[int] = np.clip(drawn.round(), 16, largest).astype(int).tolist()
        return lengths


def token_turns(dialogue: Dialogue, tokenizer: Tokenizer) -> TokenTurns:
    """For a library: the tokens before each answer, as the chat template makes them."""
    turns: TokenTurns = []
    before = models.message("system", dialogue.system) if dialogue.system else ""
    for turn in dialogue.turns:
        if isinstance(turn.text, str):
            text = before + models.message("user", turn.text) + models.ANSWER_BEGINS
            turns.append((tokenizer.encode(text).ids, turn.max_tokens))
            before = models.MESSAGE_ENDS
        else:
            turns.append((list(turn.text), turn.max_tokens))
    return turns
