"""What every dataset is, and the lengths most of them draw."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Protocol

from penstock.load.client.records import Dialogue
from penstock.load.workloads.prompts import PromptMaker


class Dataset(Protocol):
    """Makes a workload's dialogues; the same ones from the same settings, seed among them."""

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
    """`128`, or `64-256`.

    Raises:
        ValueError: it is neither.
    """
    low, _, high = text.partition("-")
    return Lengths(int(low), int(high or low))
