"""Which tokens each row of logits may draw: a bit per token of the vocabulary."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class TokenMasks(NamedTuple):
    """Masks, and which rows have one.

    Attributes:
        bits: int32 [num_masks, vocab_size / 32, rounded up]: token t may be drawn if bit t % 32 of
            word t // 32 is set.
        indices: int64 [num_rows], the mask of each row; -1: every token may be drawn.
    """

    bits: Tensor
    indices: Tensor


def mask_words(vocab_size: int) -> int:
    """Words of 32 bits in a mask."""
    return -(-vocab_size // 32)


def mask_logits(logits: Tensor, masks: TokenMasks) -> Tensor:
    """A copy of the logits [num_rows, vocab_size], -inf where a token may not be drawn."""
    (rows,) = (masks.indices >= 0).nonzero(as_tuple=True)
    words = masks.bits[masks.indices[rows]]
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    is_allowed = (words[:, :, None] >> shifts & 1).bool().flatten(1)[:, : logits.shape[1]]
    masked = logits.clone()
    masked[rows] = logits[rows].masked_fill(~is_allowed, -torch.inf)
    return masked
