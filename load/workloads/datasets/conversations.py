"""`conversations`: dialogues of several turns over one system prompt."""

from __future__ import annotations

import random
from dataclasses import dataclass

from penstock.engine.errors import ConfigError
from penstock.load.client.records import Dialogue, Turn
from penstock.load.workloads.datasets.dataset import Lengths
from penstock.load.workloads.prompts import PromptMaker


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """
    Attributes:
        system_len: tokens of the system prompt, the same in every dialogue.
        input_len: of what a user says in one turn.
        think_s: from an answer to the next turn; exponential with this mean.
    """

    num_dialogues: int
    num_turns: int
    system_len: int
    input_len: Lengths
    output_len: Lengths
    think_s: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_turns < 1:
            raise ConfigError("--turns must be at least 1")
        if self.think_s < 0:
            raise ConfigError("--think-s must not be negative")

    def make(self, prompts: PromptMaker) -> list[Dialogue]:
        """Words, never token ids: an answer comes back as text, and is sent again.

        Raises:
            ConfigError: the prompts are token ids.
        """
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
