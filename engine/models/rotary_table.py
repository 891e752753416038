"""Angles of positions as the CPU kernels look them up."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.engine.layers.attention import ForwardContext
from penstock.engine.layers.rotary import RotaryEmbedding


class RotaryTable:
    """Cosines and sines of all positions so far, grown as longer sequences come."""

    def __init__(self, rotary: RotaryEmbedding) -> None:
        self._rotary = rotary
        self._cosines = self._sines = torch.empty(0, rotary.head_dim // 2)

    @property
    def needs_prompt_lens(self) -> bool:
        return self._rotary.needs_prompt_lens

    def rows(self, context: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        """Two tables float32 [n, head_dim / 2], and each token's row in them, int64."""
        if self.needs_prompt_lens:  # a token's angles are its own
            cosines, sines = self._rotary(context.positions, context.prompt_lens, torch.float32)
            return cosines, sines, torch.arange(len(context.positions))
        if context.layout.max_seq_len > len(self._cosines):
            positions = torch.arange(1 << (context.layout.max_seq_len - 1).bit_length())
            self._cosines, self._sines = self._rotary(positions, None, torch.float32)
        return self._cosines, self._sines, context.positions
