"""Rotary positions: the cosines and sines of a step's tokens.

Not known here: where the frequencies' parameters come from (see `rope_frequencies`), and how
queries and keys are turned (see `kernels.rotary_store_kv`).
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from penstock.engine.layers.rope_frequencies import (
    RopeConfig,
    attention_factor,
    dynamic_frequencies,
    inverse_frequencies,
)


class RotaryEmbedding(nn.Module):
    """Angles for all layers, computed once a step in float32.

    Dynamic NTK derives its frequencies from the length of the sequence. Libraries that run
    one sequence at a time take the longest length so far; here batches, chunks and resumption
    must not matter, so the token at position p takes max(prompt length, p + 1): the length at
    which a plain prefill followed by single steps would have computed it.
    """

    inverse_frequencies: Tensor

    def __init__(self, config: RopeConfig, head_dim: int) -> None:
        super().__init__()
        self.config = config
        self.head_dim = head_dim
        self.scale = attention_factor(config)
        # On the CPU whatever the default device: under "meta" it would cost a second of imports.
        with torch.device("cpu"):
            frequencies = inverse_frequencies(config, head_dim)
        self.register_buffer("inverse_frequencies", frequencies, persistent=False)

    @property
    def needs_prompt_lens(self) -> bool:
        return self.config.rope_type == "dynamic"

    def forward(
        self, positions: Tensor, prompt_lens: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Cosines and sines, each [num_tokens, 1, head_dim / 2], one for all heads.

        Args:
            positions: int64 [num_tokens]
            prompt_lens: int64 [num_tokens], the prompt length of each token's sequence; given
                if `needs_prompt_lens`.
        """
        frequencies = self.inverse_frequencies  # [head_dim / 2]
        if self.needs_prompt_lens:
            lengths = torch.maximum(cast("Tensor", prompt_lens), positions + 1)
            frequencies = dynamic_frequencies(self.config, self.head_dim, lengths)
        angles = (positions[:, None].float() * frequencies)[:, None]
        return (angles.cos() * self.scale).to(dtype), (angles.sin() * self.scale).to(dtype)
