"""Normalisation layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from penstock.engine.parallel.ranks import Ranks
from penstock.engine.parallel.shard import Shard
from penstock.kernels.layer_norm import layer_norm
from penstock.kernels.rms_norm import add_rms_norm, rms_norm


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

    def forward(self, x: Tensor) -> Tensor:
        """x [num_tokens, size] → the same shape"""
        return rms_norm(x, self.weight, self.eps, self.offset)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add x to the residual stream (None: x starts it). Returns the stream's norm and the
        stream, each [num_tokens, size]."""
        if residual is None:
            return self(x), x
        return add_rms_norm(x, residual, self.weight, self.eps, self.offset)


def norms_over_ranks(
    rows: Sequence[Tensor], norms: Sequence[RMSNorm], ranks: Ranks
) -> list[Tensor]:
    """`RMSNorm`s of rows of which each rank has a part, all of the same size.

    Args:
        rows: [num_tokens, size], of each norm.
    """
    wide = [each.float() for each in rows]
    squares = torch.stack([each.square().sum(dim=1) for each in wide], dim=1)
    # Ranks exchange numbers of the model's dtype; gathered, these stay what they are.
    gathered = ranks.gather(squares.view(rows[0].dtype)).view(torch.float32)
    totals = gathered.view(-1, ranks.size, len(norms)).sum(dim=1)
    normed = []
    for number, (x, norm) in enumerate(zip(wide, norms, strict=True)):
        mean = totals[:, number, None] / (ranks.size * x.shape[1])
        y = x * torch.rsqrt(mean + norm.eps) * (norm.weight.float() + norm.offset)
        normed.append(y.to(rows[number].dtype))
    return normed


class LayerNorm(nn.Module):
    """(x − mean(x)) / sqrt(var(x) + eps) · weight (+ bias) over the last dimension, in float32."""

    bias: nn.Parameter | None
    num_groups = 1

    def __init__(self, size: int, eps: float, *, has_bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(size), requires_grad=False) if has_bias else None
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [num_tokens, size] → the same shape"""
        return layer_norm(x, self.weight, self.bias, self.eps, self.num_groups)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """The norm of x + residual (None: 0), and that sum."""
        total = x if residual is None else x + residual
        return self(total), total


class HeadNorm(LayerNorm):
    """LayerNorm of each head's part of a row, with weights of its own: [num_heads · head_dim].

    Attributes:
        shard: which of the heads' weights these are; None: all.
    """

    shard: Shard | None = None

    def __init__(self, num_heads: int, head_dim: int, eps: float, *, has_bias: bool) -> None:
        super().__init__(num_heads * head_dim, eps, has_bias=has_bias)
        self.num_groups = num_heads
