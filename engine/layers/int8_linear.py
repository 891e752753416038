"""Linear layers whose matrix is int8, in torch: what a CPU runs where the C kernels cannot.

The numbers are those of the kernels. The matrix becomes float32 again for each product, a part at a
time, so this saves memory and no time.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from penstock.engine.layers.linear import Linear
from penstock.kernels.linear_int8_reference import linear_int8_reference, quantize_rows_reference


class Int8LinearMethod:
    """A matrix of int8, and a scale for each of its rows."""

    def create_weights(self, layer: Linear) -> None:
        weight = torch.empty(layer.out_features, layer.in_features, dtype=torch.int8)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        layer.weight_scales = nn.Parameter(torch.empty(layer.out_features), requires_grad=False)

    def apply(self, layer: Linear, x: Tensor) -> Tensor:
        scales = layer.get_parameter("weight_scales")
        return linear_int8_reference(x, layer.weight, scales, layer.bias)


def quantize_linears(model: nn.Module) -> None:
    """Round the matrix of every linear layer in it, and drop the original."""
    for layer in model.modules():
        if isinstance(layer, Linear):
            values, scales = quantize_rows_reference(layer.weight)
            layer.method = Int8LinearMethod()
            layer.method.create_weights(layer)
            layer.weight.copy_(values)
            layer.get_parameter("weight_scales").copy_(scales)
