"""`trace`: a recorded trace's times and lengths; the words are made up.

A JSONL file. Either names of fields are understood, each line by itself:

    Mooncake    timestamp (ms), input_length, output_length, hash_ids (optional)
    Azure       TIMESTAMP (a date and time), ContextTokens, GeneratedTokens

`hash_ids` name the prompt's blocks of 512 tokens: requests with the same first ids share that much
of their prompts, as they did when recorded. Azure publishes CSV, which wants conversion.

Sources: Mooncake (Qin et al., FAST 2025); AzurePublicDataset, LLM inference traces of 2023, 2024.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from penstock.engine.errors import ConfigError
from penstock.load.client.records import Dialogue, Prompt, Turn
from penstock.load.workloads.datasets.lines import positive_int, read_lines
from penstock.load.workloads.prompts import PromptMaker

_HASH_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """
    Attributes:
        num_dialogues: so many at most, from the file's start.
        speedup: times are divided by it.
    """

    path: Path
    num_dialogues: int
    speedup: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.speedup < math.inf:
            raise ConfigError("--trace-speedup must be positive")

    def make(self, prompts: PromptMaker) -> list[Dialogue]:
        """The dialogues in order of time, the first at 0.

        Raises:
            ConfigError: a file or line of another form.
        """
        lines = sorted(
            (
                _Line.read(item, place)
                for place, item in read_lines(self.path, max_lines=self.num_dialogues)
            ),
            key=lambda line: line.time_s,
        )
        rng = random.Random(f"trace {self.seed}")
        return [
            Dialogue(
                turns=(Turn(text=self._prompt(line, rng, prompts), max_tokens=line.num_output),),
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
