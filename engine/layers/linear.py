"""Linear layers, plain, fused and in int8, and the embedding, whose table may be the output head.

A `LinearMethod` decides how a layer's weights are stored and multiplied: the interface for other
weight formats. The default is a dense matrix.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.kernels.linear import linear
from penstock.kernels.linear_int8_reference import linear_int8_reference, quantize_rows_reference


class LinearMethod(Protocol):
    """How a linear layer stores its weights and computes."""

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
    """A dense matrix; a row's bits do not depend on the other rows."""

    def apply(self, layer: Linear, x: Tensor) -> Tensor:
        return linear(x, layer.weight, layer.bias)


class Linear(nn.Module):
    """One matrix product, or several fused ones whose outputs are concatenated.

    Args:
        part_sizes: the output sizes of the fused parts, in order; a single one if not fused.
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


class Int8LinearMethod:
    """An int8 matrix with a scale per row, for a CPU without the C kernels.

    Gives the same numbers as the kernels. The matrix is converted to float32 for each product, a
    part at a time, so this saves memory but no time.
    """

    def create_weights(self, layer: Linear) -> None:
        weight = torch.empty(layer.out_features, layer.in_features, dtype=torch.int8)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        layer.weight_scales = nn.Parameter(torch.empty(layer.out_features), requires_grad=False)

    def apply(self, layer: Linear, x: Tensor) -> Tensor:
        scales = layer.get_parameter("weight_scales")
        return linear_int8_reference(x, layer.weight, scales, layer.bias)


def quantize_linears(model: nn.Module) -> None:
    """Quantize the matrix of every linear layer of the model, and drop the original."""
    for layer in model.modules():
        if isinstance(layer, Linear):
            values, scales = quantize_rows_reference(layer.weight)
            layer.method = Int8LinearMethod()
            layer.method.create_weights(layer)
            layer.weight.copy_(values)
            layer.get_parameter("weight_scales").copy_(scales)
