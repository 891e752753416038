"""Linear layers, plain and fused, behind the seam where other weight formats plug in.

A `LinearMethod` decides how a layer's weights are held and multiplied; the plain one is a
dense matrix. Not known here: checkpoints and parameter names outside the layer.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.kernels.linear import linear


class LinearMethod(Protocol):
    """How a linear layer keeps its weights and computes."""

    def create_weights(self, layer: Linear) -> None:
        """Register the layer's parameters, uninitialised."""

    def apply(self, layer: Linear, x: Tensor) -> Tensor:
        """x [num_tokens, in_features] → [num_tokens, out_features], the bias added."""


class DenseLinearMethod:
    """One matrix in the model's dtype."""

    def create_weights(self, layer: Linear) -> None:
        layer.weight = nn.Parameter(
            torch.empty(layer.out_features, layer.in_features), requires_grad=False
        )

    def apply(self, layer: Linear, x: Tensor) -> Tensor:
        return F.linear(x, layer.weight, layer.bias)


class InvariantLinearMethod(DenseLinearMethod):
    """The same matrix; a row's bits do not depend on the others."""

    def apply(self, layer: Linear, x: Tensor) -> Tensor:
        return linear(x, layer.weight, layer.bias)


class Linear(nn.Module):
    """One matrix product that may stand for several: their outputs lie side by side.

    Args:
        part_sizes: the output sizes of the fused parts, in order; one of them if not fused.
    """

    weight: nn.Parameter

    def __init__(
        self,
        in_features: int,
        part_sizes: tuple[int, ...],
        *,
        has_bias: bool = False,
        method: LinearMethod | None = None,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.part_sizes = part_sizes
        self.out_features = sum(part_sizes)
        self.method = method or DenseLinearMethod()
        self.method.create_weights(self)
        self.bias = (
            nn.Parameter(torch.empty(self.out_features), requires_grad=False) if has_bias else None
        )

    def forward(self, x: Tensor) -> Tensor:
        """x [num_tokens, in_features] → [num_tokens, sum(part_sizes)]"""
        return self.method.apply(self, x)
