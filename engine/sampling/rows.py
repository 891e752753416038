"""What the sampling recipe knows of each row: one sequence about to get its next token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.engine.request import SamplingParams
from penstock.engine.sampling.token_counts import TokenCounts


@dataclass(slots=True, kw_only=True)
class SamplingRow:
    """One sequence, for as long as it is on the device.

    Attributes:
        token_ids: prompt and output so far; grows from step to step.
        index: the branch of its request; part of the draw.
        num_logprobs: None, or the likeliest tokens to report beside the sampled one.
        seen: how often each token is in prompt and output.
        output: how often it is in the output.
    """

    params: SamplingParams
    token_ids: Sequence[int]
    num_prompt_tokens: int
    index: int
    num_logprobs: int | None = None
    seen: TokenCounts = field(init=False)
    output: TokenCounts = field(init=False)

    def __post_init__(self) -> None:
        self.seen = TokenCounts(self.token_ids, 0)
        self.output = TokenCounts(self.token_ids, self.num_prompt_tokens)

    @property
    def is_too_short(self) -> bool:
        """Whether it may not end yet."""
        return len(self.token_ids) - self.num_prompt_tokens < self.params.min_tokens

    @property
    def changes_logits(self) -> bool:
        """Whether anything but the draw is asked for."""
        params = self.params
        has_penalty = params.presence_penalty or params.frequency_penalty
        is_plain = params.repetition_penalty == 1.0 and not has_penalty and not params.logit_bias
        return not is_plain or self.is_too_short
