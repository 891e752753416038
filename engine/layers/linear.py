"""Linear layers, plain and fused, and the embedding, whose table may be the output head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.engine.lora.layer_adapters import LayerAdapters
from penstock.engine.parallel.ranks import ALONE, Ranks
from penstock.engine.parallel.shard import Shard
from penstock.engine.weights.matrix import DenseMatrix, Matrix, QuantizedMatrix
from penstock.kernels.linear import linear
from penstock.kernels.linear_quantized import (
    PackedMatrix,
    embed_quantized,
    linear_quantized,
    pack_for,
)


def constant(values: Tensor) -> nn.Parameter:
    """A parameter that is not trained."""
    return nn.Parameter(values, requires_grad=False)


def split_bias(bias: Tensor | None, parts: Sequence[PackedMatrix]) -> Sequence[Tensor | None]:
    """The bias of each part."""
    if bias is None:
        return [None] * len(parts)
    return torch.split(bias, [each.out_features for each in parts])


class MatrixLayer(nn.Module):
    """A matrix [out_features, in_features], dense or quantized.

    Attributes:
        part_sizes: the output sizes of the fused parts, in order; a single one if not fused.
        weight: in the model's dtype; empty if the matrix is quantized.
        quantized: the matrix from top to bottom, packed for its device; empty if it is dense. In
            torch on a CPU its products give the same numbers as the CPU's kernels; its codes are
            converted to float32 for each of them, so this saves memory but no time.
        rounds_inputs: the inputs of a quantized matrix are rounded to bytes, where
            `linear_quantized` does.
        is_invariant: a row's result does not depend on the other rows, to the bit.
        adapters: what adapters add to its results.
        shard: which part of a matrix this one is; None: all of it.
        ranks: over which its results are summed.
        is_quantizable: its numbers may become codes at load.
        may_scale_columns: as in `quantize_rows`.
    """

    is_invariant = may_scale_columns = False
    is_quantizable = True
    adapters: LayerAdapters | None = None
    shard: Shard | None = None
    ranks: Ranks = ALONE
    quantized: tuple[PackedMatrix, ...] = ()
    rounds_inputs = False
    bias: nn.Parameter | None

    def __init__(self, out_features: int, in_features: int) -> None:
        super().__init__()
        self.out_features, self.in_features = out_features, in_features
        self.part_sizes: tuple[int, ...] = (out_features,)
        self.weight = constant(torch.empty(out_features, in_features))
        self.bias = None

    @property
    def whole_shape(self) -> tuple[tuple[int, ...], int]:
        """The rows of each part, and the columns, of the matrix of which this may be a share."""
        if self.shard is None:
            return self.part_sizes, self.in_features
        return self.shard.part_sizes, self.shard.in_features

    def set_matrix(
        self, matrix: Matrix, *, rounds_inputs: bool = True, like: Tensor | None = None
    ) -> None:
        """Use this matrix instead.

        Args:
            like: has the model's dtype and device; None: the present weight has.
        """
        if isinstance(matrix, DenseMatrix):
            self.weight, self.quantized = constant(matrix.values), ()
            return
        parts = (matrix,) if isinstance(matrix, QuantizedMatrix) else matrix.parts
        like = self.weight if like is None else like
        codes = [part.for_kernels() for part in parts]
        # A CPU multiplies no bytes of floats, and all parts of a layer alike.
        is_possible = like.is_cuda or not any(each.is_float8 for each in codes)
        self.rounds_inputs = rounds_inputs and is_possible
        self.quantized = tuple(pack_for(like, each, in_bytes=self.rounds_inputs) for each in codes)
        self.weight = constant(like.new_empty(0))

    def drop(self) -> None:
        """Lose the matrix."""
        self.set_matrix(DenseMatrix(self.weight.new_empty(0)))

    @property
    def num_bytes(self) -> int:
        """Of the matrix, as it is held."""
        return self.weight.nbytes + sum(each.nbytes for each in self.quantized)

    def multiply(self, x: Tensor) -> Tensor:
        """In torch: x [num_rows, in_features] → x · matrixᵀ (+ bias), [num_rows, out_features]"""
        bias = self.bias
        if not self.quantized:
            return (linear if self.is_invariant else F.linear)(x, self.weight, bias)
        products = (
            linear_quantized(
                x, part, each, in_bytes=self.rounds_inputs, is_invariant=self.is_invariant
            )
            for part, each in zip(self.quantized, split_bias(bias, self.quantized), strict=True)
        )
        return next(products) if len(self.quantized) == 1 else torch.cat(list(products), dim=1)


class Linear(MatrixLayer):
    """One matrix product, or several fused ones whose outputs are concatenated."""

    may_scale_columns = True

    def __init__(
        self, in_features: int, part_sizes: tuple[int, ...], *, has_bias: bool = False
    ) -> None:
        super().__init__(sum(part_sizes), in_features)
        self.part_sizes = part_sizes
        self.bias = constant(torch.empty(self.out_features)) if has_bias else None


class Embedding(MatrixLayer):
    """A table of one vector per token id; as an output head, one dot product per id.

    Attributes:
        first_id, num_ids: of the ids that it has; num_ids 0: all.
    """

    first_id, num_ids = 0, 0

    def __init__(self, vocab_size: int, hidden_size: int, *, has_bias: bool = False) -> None:
        super().__init__(vocab_size, hidden_size)
        self.bias = constant(torch.empty(vocab_size)) if has_bias else None

    def look_up(self, token_ids: Tensor) -> Tensor:
        """In torch: token_ids [num_tokens] → their rows, [num_tokens, hidden_size], zeros for
        those that other ranks have"""
        rows, is_here = token_ids, None
        if self.num_ids:
            rows = token_ids - self.first_id
            is_here = (rows >= 0) & (rows < self.num_ids)
            rows = rows.clamp(0, self.num_ids - 1)
        if self.quantized:
            y = embed_quantized(rows, self.quantized[0], self.weight.dtype)
        else:
            y = F.embedding(rows, self.weight)
        return y if is_here is None else torch.where(is_here[:, None], y, 0.0)


def weight_bytes(module: nn.Module) -> int:
    """Size of all weights of a module, as they are held."""
    layers = [each for each in module.modules() if isinstance(each, MatrixLayer)]
    quantized = sum(each.nbytes for layer in layers for each in layer.quantized)
    return quantized + sum(each.nbytes for each in module.parameters())
