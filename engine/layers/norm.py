"""Normalisation layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from penstock.kernels.rms_norm import add_rms_norm, rms_norm


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight over the last dimension, the mean in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [num_tokens, size] → the same shape"""
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add x to the residual stream (None: x starts it). Returns the stream's norm and the
        stream, each [num_tokens, size]."""
        if residual is None:
            return self(x), x
        return add_rms_norm(x, residual, self.weight, self.eps)
