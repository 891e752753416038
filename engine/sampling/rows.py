"""What the sampling recipe knows of each row: one sequence about to get its next token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.engine.request import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRow:
    """One sequence; row i of the logits is the distribution of its next token.

    Attributes:
        token_ids: prompt and output so far.
        index: the branch of its request; part of the draw.
        num_logprobs: None, or the likeliest tokens to report beside the sampled one.
    """

    params: SamplingParams
    token_ids: Sequence[int]
    num_prompt_tokens: int
    index: int
    num_logprobs: int | None = None

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> Sequence[int]:
        return self.token_ids[self.num_prompt_tokens :]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """One row's next token.

    Attributes:
        is_valid: False if the logits held no distribution (NaN, or everything masked): the
            token is then arbitrary and its sequence should end in an error.
        logprobs: set if the row asked for them.
    """

    token_id: int
    is_valid: bool = True
    logprobs: TokenLogprobs | None = None
