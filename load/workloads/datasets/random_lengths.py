"""`random`: single turns with nothing in common, lengths uniform."""

from __future__ import annotations

import random
from dataclasses import dataclass

from penstock.load.client.records import Dialogue, Turn
from penstock.load.workloads.datasets.dataset import Lengths
from penstock.load.workloads.prompts import PromptMaker


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomLengths:
    num_dialogues: int
    input_len: Lengths
    output_len: Lengths
    seed: int = 0

    def make(self, prompts: PromptMaker) -> list[Dialogue]:
        rng = random.Random(f"random {self.seed}")
        return [
            Dialogue(
                turns=(
                    Turn(
                        text=prompts.draw(rng, self.input_len.draw(rng)),
                        max_tokens=self.output_len.draw(rng),
                    ),
                )
            )
            for _ in range(self.num_dialogues)
        ]
