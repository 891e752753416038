"""What every dataset is, and the lengths most of them draw."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, Protocol

import orjson

from penstock.engine.errors import ConfigError
from penstock.load.client.records import Dialogue, Prompt, Turn, single_turn
from penstock.load.workloads.lengths import TraceSpec, make_trace
from penstock.load.workloads.prompts import PromptMaker


class Dataset(Protocol):
    """Makes a workload's dialogues; the same ones from the same settings, seed among them. Each is
    a dataclass, whose fields the command line fills."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def make(self, prompts: PromptMaker) -> list[Dialogue]: ...


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths in tokens, each between two bounds as likely as any other.

    Attributes:
        low, high: both may be drawn.
    """

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
    """`128`, or `64-256`. Raises ValueError if it is neither."""
    low, _, high = text.partition("-")
    return Lengths(int(low), int(high or low))


def read_lines(path: Path, *, max_lines: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The first objects of a file, each with its place for messages; empty lines do not count.
    Raises ConfigError: no such file, nothing in it, or a line that is no JSON object."""
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
    """A count. Raises ConfigError if it is none."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{place}: {name} must be a whole number of 1 or more, not {value!r}")
    return value


def _object(line: bytes, place: str) -> Mapping[str, Any]:
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{place}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{place}: an object is needed")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomLengths:
    """Single turns with nothing in common, lengths uniform."""

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


_DEFAULT = TraceSpec()


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareGpt:
    """Single turns with ShareGPT's lognormal lengths, in tokens: means are those before lengths
    are clipped to the other bounds."""

    num_dialogues: int
    prompt_mean: float = _DEFAULT.prompt_mean
    output_mean: float = _DEFAULT.output_mean
    sigma: float = _DEFAULT.sigma  # of the logarithm of either length
    shortest: int = _DEFAULT.shortest
    max_input_tokens: int = _DEFAULT.longest
    max_output_tokens: int = _DEFAULT.longest
    seed: int = 0

    def make(self, prompts: PromptMaker) -> list[Dialogue]:
        rng = random.Random(f"sharegpt {self.seed}")
        trace = make_trace(
            TraceSpec(
                num_requests=self.num_dialogues,
                seed=self.seed,
                prompt_mean=self.prompt_mean,
                output_mean=self.output_mean,
                sigma=self.sigma,
                shortest=self.shortest,
                longest=max(self.max_input_tokens, self.max_output_tokens),
            )
        )
        return [
            single_turn(
                prompts.draw(rng, min(traced.num_prompt_tokens, self.max_input_tokens)),
                min(traced.num_output_tokens, self.max_output_tokens),
            )
            for traced in trace
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefix:
    """Single turns, each over one of few long prefixes: what a prefix cache is for."""

    num_dialogues: int
    num_prefixes: int  # dialogues take them in turn
    prefix_len: int  # tokens of each; a system prompt, or the first of the prompt's token ids
    input_len: Lengths  # of what follows, which nobody shares
    output_len: Lengths
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_prefixes < 1:
            raise ConfigError("--num-prefixes must be at least 1")

    def make(self, prompts: PromptMaker) -> list[Dialogue]:
        rng = random.Random(f"shared-prefix {self.seed}")
        prefixes = [prompts.draw(rng, self.prefix_len) for _ in range(self.num_prefixes)]
        dialogues = []
        for index in range(self.num_dialogues):
            prefix = prefixes[index % self.num_prefixes]
            text = prompts.draw(rng, self.input_len.draw(rng))
            max_tokens = self.output_len.draw(rng)
            if isinstance(prefix, str) or isinstance(text, str):
                dialogues.append(single_turn(text, max_tokens, system=str(prefix)))
            else:
                dialogues.append(single_turn(prefix + text, max_tokens))
        return dialogues


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """Dialogues of several turns over one system prompt."""

    num_dialogues: int
    num_turns: int
    system_len: int  # tokens of the system prompt, the same in every dialogue
    input_len: Lengths  # of what a user says in one turn
    output_len: Lengths
    think_s: float = 0.0  # from an answer to the next turn; exponential with this mean
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_turns < 1:
            raise ConfigError("--turns must be at least 1")
        if self.think_s < 0:
            raise ConfigError("--think-s must not be negative")

    def make(self, prompts: PromptMaker) -> list[Dialogue]:
        """Words, never token ids: an answer comes back as text, and is sent again. Raises
        ConfigError if the prompts are token ids."""
        rng = random.Random(f"conversations {self.seed}")
        system = prompts.draw(rng, self.system_len)
        if not isinstance(system, str):
            raise ConfigError("conversations need words, not token ids")
        return [
            Dialogue(turns=tuple(self._turns(rng, prompts)), system=system)
            for _ in range(self.num_dialogues)
        ]

    def _turns(self, rng: random.Random, prompts: PromptMaker) -> list[Turn]:
        return [
            Turn(
                text=prompts.draw(rng, self.input_len.draw(rng)),
                max_tokens=self.output_len.draw(rng),
                think_s=rng.expovariate(1 / self.think_s) if number and self.think_s else 0.0,
            )
            for number in range(self.num_turns)
        ]


_SYSTEM_ROLES, _ROLES = ("system", "developer"), ("system", "developer", "user", "assistant")


@dataclass(frozen=True, slots=True, kw_only=True)
class Jsonl:
    """A user's own prompts, a JSON object a line.

        {"prompt": "text" or [token ids], "max_tokens": 64}
        {"messages": [{"role": "system", ...}, {"role": "user", "content": "text"}, ...]}

    Each message of a user is a turn. Answers of an assistant are left out: the server gives its
    own. `output_tokens` means the same as `max_tokens`; without either, a default counts.
    """

    path: Path
    num_dialogues: int  # so many at most, from the file's start
    max_tokens: int  # where a line says nothing

    def make(self, _: PromptMaker) -> list[Dialogue]:
        """Raises ConfigError for a file or line of another form."""
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
            raise ConfigError(f"{place}: no message of a user")
        return Dialogue(
            turns=tuple(Turn(text=content, max_tokens=max_tokens) for content in users),
            system="\n\n".join(content for role, content in said if role in _SYSTEM_ROLES),
        )


def _prompt(value: object, place: str) -> Prompt:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        return tuple(value)
    raise ConfigError(f"{place}: needs messages, or a prompt: a text or a list of token ids")


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


_HASH_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A recorded trace's times and lengths; the words are made up.

    A JSONL file. Either names of fields are understood, each line by itself:

        Mooncake    timestamp (ms), input_length, output_length, hash_ids (optional)
        Azure       TIMESTAMP (a date and time), ContextTokens, GeneratedTokens

    `hash_ids` name the prompt's blocks of 512 tokens: requests with the same first ids share that
    much of their prompts, as they did when recorded. Azure publishes CSV, which wants conversion.

    Sources: Mooncake (Qin et al., FAST 2025); AzurePublicDataset, LLM inference traces of 2023,
    2024.
    """

    path: Path
    num_dialogues: int  # so many at most, from the file's start
    speedup: float = 1.0  # times are divided by it
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.speedup < math.inf:
            raise ConfigError("--trace-speedup must be positive")

    def make(self, prompts: PromptMaker) -> list[Dialogue]:
        """The dialogues in order of time, the first at 0. Raises ConfigError for a file or line of
        another form."""
        lines = sorted(
            (
                _Line.read(item, place)
                for place, item in read_lines(self.path, max_lines=self.num_dialogues)
            ),
            key=lambda line: line.time_s,
        )
        rng = random.Random(f"trace {self.seed}")
        return [
            single_turn(
                self._prompt(line, rng, prompts),
                line.num_output,
                at_s=(line.time_s - lines[0].time_s) / self.speedup,
            )
            for line in lines
        ]

    def _prompt(self, line: _Line, rng: random.Random, prompts: PromptMaker) -> Prompt:
        parts, missing = [], line.num_input
        for hash_id in line.hash_ids[: -(-line.num_input // _HASH_BLOCK_TOKENS)]:
            num_tokens = min(_HASH_BLOCK_TOKENS, missing)
            parts.append(prompts.draw(random.Random(f"{self.seed} {hash_id}"), num_tokens))
            missing -= num_tokens
        if missing:
            parts.append(prompts.draw(rng, missing))
        return _joined(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """One request as it was recorded."""

    time_s: float
    num_input: int
    num_output: int
    hash_ids: tuple[int, ...] = ()

    @classmethod
    def read(cls, item: Mapping[str, Any], place: str) -> _Line:
        if "TIMESTAMP" in item:
            return cls(
                time_s=_date_s(item["TIMESTAMP"], place),
                num_input=positive_int(item.get("ContextTokens"), "ContextTokens", place),
                num_output=positive_int(item.get("GeneratedTokens"), "GeneratedTokens", place),
            )
        hash_ids = item.get("hash_ids", [])
        if not isinstance(hash_ids, list):
            raise ConfigError(f"{place}: hash_ids must be a list")
        return cls(
            time_s=_number(item.get("timestamp"), "timestamp", place) / 1000,
            num_input=positive_int(item.get("input_length"), "input_length", place),
            num_output=positive_int(item.get("output_length"), "output_length", place),
            hash_ids=tuple(hash_ids),
        )


def _number(value: object, name: str, place: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ConfigError(f"{place}: {name} must be a number, not {value!r}")
    return value


def _date_s(value: object, place: str) -> float:
    try:
        return datetime.fromisoformat(str(value)).timestamp()
    except ValueError as error:
        raise ConfigError(f"{place}: TIMESTAMP must be a date and time, not {value!r}") from error


def _joined(parts: Sequence[Prompt]) -> Prompt:
    texts = [part for part in parts if isinstance(part, str)]
    if texts:
        return " ".join(texts)
    return tuple(token_id for part in parts if not isinstance(part, str) for token_id in part)
