"""The datasets, and the prompts that they draw."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import AliasChoices, BaseModel, Field, PositiveInt, ValidationError

from penstock.engine.errors import ConfigError
from penstock.load.client.records import Dialogue, Prompt, Turn, single_turn


class Dataset(Protocol):
    """Makes a workload's dialogues, the same ones for the same settings and seed. Each dataset
    is a dataclass whose fields the command line fills."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def make(self, prompts: PromptMaker) -> list[Dialogue]: ...


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths in tokens, uniform between two inclusive bounds."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ValueError(f"lengths {self} must be positive and ascending")

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)

    @classmethod
    def fixed(cls, num_tokens: int) -> Lengths:
        return cls(num_tokens, num_tokens)


def lengths(text: str) -> Lengths:
    """Parse `128` or `64-256`. Raises ValueError otherwise."""
    low, _, high = text.partition("-")
    return Lengths(int(low), int(high or low))


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomLengths:
    """Single turns with nothing in common, of uniform lengths."""

    num_dialogues: int
    input_len: Lengths
    output_len: Lengths
    seed: int = 0

    def make(self, prompts: PromptMaker) -> list[Dialogue]:
        rng = random.Random(f"random {self.seed}")
        return [
            single_turn(prompts.draw(rng, self.input_len.draw(rng)), self.output_len.draw(rng))
            for _ in range(self.num_dialogues)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareGpt:
    """Single turns of lognormal lengths in tokens.

    The default means, before clipping, are those of ShareGPT's conversations, as in PagedAttention
    (Kwon et al., SOSP 2023), section 6.1.
    """

    num_dialogues: int
    prompt_mean: float = 161.0
    output_mean: float = 338.0
    sigma: float = 1.0  # of the logarithm of either length
    shortest: int = 4
    max_input_tokens: int = 1024
    max_output_tokens: int = 1024
    seed: int = 0

    def make(self, prompts: PromptMaker) -> list[Dialogue]:
        rng, lengths = random.Random(f"sharegpt {self.seed}"), random.Random(self.seed)
        dialogues = []
        for _ in range(self.num_dialogues):
            num_prompt = self._draw(lengths, self.prompt_mean, self.max_input_tokens)
            num_output = self._draw(lengths, self.output_mean, self.max_output_tokens)
            dialogues.append(single_turn(prompts.draw(rng, num_prompt), num_output))
        return dialogues

    def _draw(self, rng: random.Random, mean: float, longest: int) -> int:
        # A lognormal's mean is exp(μ + σ²/2).
        length = round(rng.lognormvariate(math.log(mean) - self.sigma**2 / 2, self.sigma))
        return min(max(length, self.shortest), longest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """Dialogues of several turns over one system prompt."""

    num_dialogues: int
    num_turns: int
    system_len: int  # tokens of the system prompt, the same in every dialogue
    input_len: Lengths  # of what a user says in one turn
    output_len: Lengths
    seed: int = 0

    def make(self, prompts: PromptMaker) -> list[Dialogue]:
        """Prompts are words, since answers come back as text and are sent again. Raises
        ConfigError if the prompts are token ids."""
        rng = random.Random(f"conversations {self.seed}")
        system = prompts.draw(rng, self.system_len)
        if not isinstance(system, str):
            raise ConfigError("conversations need words, not token ids")
        return [
            Dialogue(
                turns=tuple(
                    Turn(
                        text=prompts.draw(rng, self.input_len.draw(rng)),
                        max_tokens=self.output_len.draw(rng),
                    )
                    for _ in range(self.num_turns)
                ),
                system=system,
            )
            for _ in range(self.num_dialogues)
        ]


class _Message(BaseModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: str


class _Line(BaseModel):
    prompt: Annotated[str, Field(min_length=1)] | Annotated[list[int], Field(min_length=1)] = ""
    messages: list[_Message] | None = None
    max_tokens: PositiveInt | None = Field(
        None, validation_alias=AliasChoices("max_tokens", "output_tokens")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Jsonl:
    """A user's own prompts, one JSON object per line.

        {"prompt": "text" or [token ids], "max_tokens": 64}
        {"messages": [{"role": "system", ...}, {"role": "user", "content": "text"}, ...]}

    Each user message is a turn. Assistant messages are left out, since the server gives its own
    answers. `output_tokens` means `max_tokens`; without either, a default applies.
    """

    path: Path
    num_dialogues: int  # the maximum, from the file's start
    max_tokens: int  # default

    def make(self, _: PromptMaker) -> list[Dialogue]:
        """Raises ConfigError if the file is missing or empty, or a line is invalid."""
        dialogues: list[Dialogue] = []
        try:
            with self.path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    if len(dialogues) < self.num_dialogues and line.strip():
                        dialogues.append(self._dialogue(line, f"{self.path}, line {number}"))
        except OSError as error:
            raise ConfigError(
                f"--dataset-path: cannot read {self.path}: {error.strerror}"
            ) from error
        if not dialogues:
            raise ConfigError(f"--dataset-path: {self.path} is empty")
        return dialogues

    def _dialogue(self, line: bytes, place: str) -> Dialogue:
        try:
            asked = _Line.model_validate_json(line, strict=True)
        except ValidationError as error:
            wrong = error.errors()[0]
            name = ".".join(map(str, wrong["loc"]))
            raise ConfigError(f"{place}: {name or 'JSON'}: {wrong['msg']}") from error
        max_tokens = asked.max_tokens or self.max_tokens
        if asked.messages is None:
            prompt = asked.prompt if isinstance(asked.prompt, str) else tuple(asked.prompt)
            users, system = [prompt] if prompt else [], ""
        else:
            users = [each.content for each in asked.messages if each.role == "user"]
            systems = (each for each in asked.messages if each.role in ("system", "developer"))
            system = "\n\n".join(each.content for each in systems)
        if not users:
            raise ConfigError(f"{place}: needs a prompt, or messages with one of a user")
        turns = tuple(Turn(text=text, max_tokens=max_tokens) for text in users)
        return Dialogue(turns=turns, system=system)


# -- prompts -------------------------------------------------------------------------------------

DEFAULT_VOCAB_SIZE = 1000  # smaller than any vocabulary in use

_COMMON_WORDS = """
the of and to in is that for it as was with be by on not he his but at are this have from or had
an they which one you were all her she there would their we him has when who will no more
if out so up said what its about than into them can only other time new some could these two may
first then do any like my now over such our man me even most made after also did many off before
must well back through years much where your way down should because long each just state those
people too little good world make very year still see work life being under day house here never
between both came war place great right old part take hand high school however next water
"""
WORDS = tuple(_COMMON_WORDS.split())


class PromptMaker(Protocol):
    """Draws prompts; the datasets' only source of text."""

    def draw(self, rng: random.Random, num_tokens: int) -> Prompt: ...


@dataclass(frozen=True, slots=True)
class TokenIds:
    """Prompts of exactly `num_tokens` token ids."""

    ids: Sequence[int] = range(DEFAULT_VOCAB_SIZE)  # those that may be drawn

    def draw(self, rng: random.Random, num_tokens: int) -> tuple[int, ...]:
        return tuple(rng.choices(self.ids, k=num_tokens))


class Words:
    """Prompts of common words. A word counts as a token, since most tokenizers have these words as
    one token."""

    def draw(self, rng: random.Random, num_tokens: int) -> str:
        return " ".join(rng.choices(WORDS, k=num_tokens))
