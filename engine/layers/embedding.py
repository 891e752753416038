"""Token embeddings, and the output head that may share them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.kernels.linear import linear


class Embedding(nn.Module):
    """A table of one vector per token id; as an output head, one dot product per id.

    Attributes:
        is_invariant: a row's logits do not depend on the other rows, to the bit.
    """

    is_invariant = False

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        """token_ids [num_tokens] → [num_tokens, hidden_size]"""
        return F.embedding(token_ids, self.weight)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [num_rows, hidden_size] → [num_rows, vocab_size]"""
        return (linear if self.is_invariant else F.linear)(hidden, self.weight)
