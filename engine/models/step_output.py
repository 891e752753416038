"""What a step of a model leaves behind."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


class DrawnTokens:
    """The next token of each row, in the host's memory.

    Attributes:
        token_ids, is_valid: int64 and bool, [num_rows] each, as `sample_tokens` has them.
    """

    __slots__ = ("_token_ids", "_validity", "is_valid", "token_ids")

    def __init__(self, num_rows: int) -> None:
        self.token_ids = torch.empty(num_rows, dtype=torch.int64)
        self.is_valid = torch.empty(num_rows, dtype=torch.bool)
        # For reading: in a step of a small model torch's own calls would be seen.
        self._token_ids, self._validity = self.token_ids.numpy(), self.is_valid.numpy()

    def read(self) -> tuple[list[int], list[bool]]:
        return self._token_ids.tolist(), self._validity.tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """One step, as the model computed it.

    Attributes:
        hidden: [num_tokens, hidden_size]
        logits: [num_sampled, vocab_size], of the tokens that another one follows.
        drawn: None, or what `sample_tokens` makes of these logits as they are.
    """

    hidden: Tensor
    logits: Tensor
    drawn: DrawnTokens | None = None
