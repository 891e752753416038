"""`sharegpt`: single turns with the lognormal lengths of ShareGPT (`load.kv.trace`)."""

from __future__ import annotations

import random
from dataclasses import dataclass

from penstock.load.client.records import Dialogue, Turn
from penstock.load.kv.trace import TraceSpec, make_trace
from penstock.load.workloads.prompts import PromptMaker

_DEFAULT = TraceSpec()


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareGpt:
    """
    Attributes:
        prompt_mean, output_mean: tokens, of the distributions before clipping.
        sigma: of the logarithm of either length.
        shortest, max_input_tokens, max_output_tokens: lengths are clipped to these.
    """

    num_dialogues: int
    prompt_mean: float = _DEFAULT.prompt_mean
    output_mean: float = _DEFAULT.output_mean
    sigma: float = _DEFAULT.sigma
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
            Dialogue(
                turns=(
                    Turn(
                        text=prompts.draw(
                            rng, min(traced.num_prompt_tokens, self.max_input_tokens)
                        ),
                        max_tokens=min(traced.num_output_tokens, self.max_output_tokens),
                    ),
                )
            )
            for traced in trace
        ]
