"""Linear layers, plain and fused, and the embedding, whose table may be the output head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.engine.weights.matrix import DenseMatrix, Matrix, QuantizedMatrix, is_int8_by_row
from penstock.kernels.linear import linear
from penstock.kernels.linear_int8_reference import linear_int8_reference


class Linear(nn.Module):
    """One matrix product, or several fused ones whose outputs are concatenated.

    Args:
        part_sizes: the output sizes of the fused parts, in order; a single one if not fused.

    Attributes:
        weight: [out_features, in_features], in the model's dtype or, with `scales`, in int8.
        scales: float32 [out_features], of the rows of an int8 matrix. Its products give the same
            numbers as the CPU's kernels; it is converted to float32 for each of them, a part at a
            time, so this saves memory but no time.
        is_invariant: a row's result does not depend on the other rows, to the bit.
    """

    is_invariant = False
    bias: nn.Parameter | None
    scales: nn.Parameter | None

    def __init__(
        self, in_features: int, part_sizes: tuple[int, ...], *, has_bias: bool = False
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.part_sizes = part_sizes
        self.out_features = sum(part_sizes)
        self.weight = constant(torch.empty(self.out_features, in_features))
        self.scales = None
        self.bias = constant(torch.empty(self.out_features)) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x [num_tokens, in_features] → [num_tokens, sum(part_sizes)]"""
        if self.scales is not None:
            return linear_int8_reference(x, self.weight, self.scales, self.bias)
        return (linear if self.is_invariant else F.linear)(x, self.weight, self.bias)

    def hold(self, matrix: Matrix) -> None:
        """Use this matrix instead."""
        if isinstance(matrix, DenseMatrix):
            self.weight, self.scales = constant(matrix.values), None
        else:
            assert is_int8_by_row(matrix), "torch has no products for other codes"
            self.weight, self.scales = constant(matrix.codes), constant(matrix.scales[:, 0])

    def take(self) -> Matrix:
        """The matrix, which the layer loses."""
        weight, scales = self.weight.data, self.scales
        self.hold(DenseMatrix(weight.new_empty(0)))
        if scales is None:
            return DenseMatrix(weight)
        size = weight.shape[1]
        return QuantizedMatrix(codes=weight, scales=scales.data[:, None], columns_per_scale=size)


def constant(values: Tensor) -> nn.Parameter:
    """A parameter that is not trained."""
    return nn.Parameter(values, requires_grad=False)


class Embedding(nn.Module):
    """A table of one vector per token id; as an output head, one dot product per id.

    Attributes:
        is_invariant: a row's logits do not depend on the other rows, to the bit.
    """

    is_invariant = False

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.shape = vocab_size, hidden_size
        self.weight = constant(torch.empty(self.shape))

    def forward(self, token_ids: Tensor) -> Tensor:
        """token_ids [num_tokens] → [num_tokens, hidden_size]"""
        return F.embedding(token_ids, self.weight)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [num_rows, hidden_size] → [num_rows, vocab_size]"""
        return (linear if self.is_invariant else F.linear)(hidden, self.weight)
