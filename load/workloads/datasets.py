"""The datasets, and the prompts that they draw."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import orjson

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


def read_lines(path: Path, *, max_lines: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The first objects of a file, each with its position for messages; empty lines do not
    count. Raises ConfigError if the file is missing or empty, or a line is no JSON object."""
    num_read = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if num_read == max_lines:
                    return
                if line.strip():
                    num_read += 1
                    yield f"{path}, line {number}", _object(line, f"{path}, line {number}")
    except OSError as error:
        raise ConfigError(f"--dataset-path: cannot read {path}: {error.strerror}") from error
    if num_read == 0:
        raise ConfigError(f"--dataset-path: {path} is empty")


def positive_int(value: object, name: str, place: str) -> int:
    """A count. Raises ConfigError if it is not one."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{place}: {name} must be a whole number of 1 or more, not {value!r}")
    return value


def _object(line: bytes, place: str) -> Mapping[str, Any]:
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{place}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{place}: must be a JSON object")
    return value


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


_SYSTEM_ROLES, _ROLES = ("system", "developer"), ("system", "developer", "user", "assistant")


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
        """Raises ConfigError if the file or a line is invalid."""
        lines = read_lines(self.path, max_lines=self.num_dialogues)
        return [self._dialogue(item, place) for place, item in lines]

    def _dialogue(self, item: Mapping[str, Any], place: str) -> Dialogue:
        value = item.get("max_tokens", item.get("output_tokens", self.max_tokens))
        max_tokens = positive_int(value, "max_tokens", place)
        if "messages" not in item:
            prompt = _prompt(item.get("prompt"), place)
            return single_turn(prompt, max_tokens)
        said = list(_messages(item["messages"], place))
        users = [content for role, content in said if role == "user"]
        if not users:
            raise ConfigError(f"{place}: no user message")
        return Dialogue(
            turns=tuple(Turn(text=content, max_tokens=max_tokens) for content in users),
            system="\n\n".join(content for role, content in said if role in _SYSTEM_ROLES),
        )


def _prompt(value: object, place: str) -> Prompt:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        return tuple(value)
    raise ConfigError(f"{place}: needs messages, or a prompt (a text or a list of token ids)")


def _messages(value: object, place: str) -> Iterator[tuple[str, str]]:
    """Role and content of each."""
    if not isinstance(value, list):
        raise ConfigError(f"{place}: messages must be a list")
    for message in value:
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            raise ConfigError(f"{place}: a message needs a role: one of {', '.join(_ROLES)}")
        if not isinstance(message.get("content"), str):
            raise ConfigError(f"{place}: a message's content must be a text")
        yield message["role"], message["content"]


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
