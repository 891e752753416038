"""`shared-prefix`: single turns, each over one of few long prefixes: what a prefix cache is for."""

from __future__ import annotations

import random
from dataclasses import dataclass

from penstock.engine.errors import ConfigError
from penstock.load.client.records import Dialogue, Turn
from penstock.load.workloads.datasets.dataset import Lengths
from penstock.load.workloads.prompts import PromptMaker


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefix:
    """
    Attributes:
        num_prefixes: dialogues take them in turn.
        prefix_len: tokens of each; a system prompt, or the first of the prompt's token ids.
        input_len: of what follows, which nobody shares.
    """

    num_dialogues: int
    num_prefixes: int
    prefix_len: int
    input_len: Lengths
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
                turn = Turn(text=text, max_tokens=max_tokens)
                dialogues.append(Dialogue(turns=(turn,), system=str(prefix)))
            else:
                turn = Turn(text=prefix + text, max_tokens=max_tokens)
                dialogues.append(Dialogue(turns=(turn,)))
        return dialogues
