"""What a step of a model leaves behind."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """One step, as the model computed it.

    Attributes:
        hidden: [num_tokens, hidden_size]
        logits: [num_sampled, vocab_size], of the tokens that another one follows.
        drawn: None, or what `sample_tokens` makes of these logits as they are: int64 and bool,
            [num_sampled] each.
    """

    hidden: Tensor
    logits: Tensor
    drawn: tuple[Tensor, Tensor] | None = None
