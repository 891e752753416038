"""The tensors that captured steps read: they stay where they are, and are filled before a replay.

A step of fewer tokens than a graph was captured for is padded at its end: a padded token has the
slot −1, so nothing of it is stored, and what comes out for it is cut off.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.engine.layers.attention import ForwardContext


class GraphInputs:
    """What is known of each token of a step.

    Args:
        num_tokens: of the largest step.
        needs_prompt_lens: as a model says.
    """

    def __init__(self, num_tokens: int, device: torch.device, *, needs_prompt_lens: bool) -> None:
        # int64 [num_tokens] each. Ids and positions of padding are those of earlier steps.
        self.input_ids = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        self.positions = torch.zeros_like(self.input_ids)
        self.slots = torch.full_like(self.input_ids, -1)
        self.prompt_lens = torch.ones_like(self.input_ids) if needs_prompt_lens else None

    def fill(self, input_ids: Tensor, context: ForwardContext, size: int) -> None:
        """A step's tokens, padded to `size`."""
        num_tokens = len(input_ids)
        self.input_ids[:num_tokens].copy_(input_ids)
        self.positions[:num_tokens].copy_(context.positions)
        self.slots[:num_tokens].copy_(context.layout.slot_mapping)
        if num_tokens < size:
            self.slots[num_tokens:size].fill_(-1)
        if self.prompt_lens is not None:
            assert context.prompt_lens is not None
            self.prompt_lens[:num_tokens].copy_(context.prompt_lens)

    def prompt_lens_of(self, size: int) -> Tensor | None:
        return None if self.prompt_lens is None else self.prompt_lens[:size]


def padded_size(sizes: Sequence[int], num_tokens: int) -> int | None:
    """The smallest captured size that holds a step; None if none does.

    Args:
        sizes: ascending.
    """
    place = bisect_left(sizes, num_tokens)
    return sizes[place] if place < len(sizes) else None
