"""Normalisation layers."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import nn

from penstock.engine.parallel.shard import Shard


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · (weight + offset) over the last dimension, the mean in float32.

    Attributes:
        shard: which of the weights these are; None: all.
    """

    shard: Shard | None = None

    def __init__(self, size: int, eps: float, *, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps, self.offset = eps, offset


class LayerNorm(nn.Module):
    """(x − mean(x)) / sqrt(var(x) + eps) · weight (+ bias) over the last dimension, in float32."""

    bias: nn.Parameter | None
    num_groups = 1

    def __init__(self, size: int, eps: float, *, has_bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(size), requires_grad=False) if has_bias else None
        self.eps = eps


Norm: TypeAlias = RMSNorm | LayerNorm


class HeadNorm(LayerNorm):
    """LayerNorm of each head's part of a row, with weights of its own: [num_heads · head_dim].

    Attributes:
        shard: which of the heads' weights these are; None: all.
    """

    shard: Shard | None = None

    def __init__(self, num_heads: int, head_dim: int, eps: float, *, has_bias: bool) -> None:
        super().__init__(num_heads * head_dim, eps, has_bias=has_bias)
        self.num_groups = num_heads
