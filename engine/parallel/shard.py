"""A rank's share of a matrix: some rows of each of its parts, or some of its columns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from penstock.engine.errors import ConfigError
from penstock.engine.weights.matrix import (
    DenseMatrix,
    Matrix,
    QuantizedMatrix,
    StackedMatrix,
    rows_of,
    take_columns,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """
    Attributes:
        part_sizes, in_features: of the whole matrix.
        rows: of each part; None: all.
        columns: None: all.
        has_bias: it adds the bias; of those that have columns, whose products are summed, the first
            rank does.
    """

    part_sizes: tuple[int, ...]
    in_features: int = 1
    rows: tuple[range, ...] | None = None
    columns: range | None = None
    has_bias: bool = True

    def take(self, matrix: Matrix, name: str) -> Matrix:
        """
        Args:
            name: of the matrix, in a message.

        Raises:
            ConfigError: blocks of columns that have a scale cannot be cut there.
        """
        if self.rows is not None:
            matrix = rows_of(matrix, self.row_numbers)
        return matrix if self.columns is None else _columns_of(matrix, self.columns, name)

    def take_bias(self, bias: Tensor) -> Tensor:
        """bias [..., out_features] → the share"""
        if self.rows is not None:
            return bias[..., self.row_numbers]
        return bias if self.has_bias else torch.zeros_like(bias)

    def take_update(self, a: Tensor, b: Tensor, part: int | None) -> tuple[Tensor, Tensor]:
        """The share of the update b · a of a part (None: of all): a [rank, in_features],
        b [out_features, rank]."""
        if self.rows is not None:
            b = b[self.row_numbers if part is None else torch.tensor(self.rows[part])]
        if self.columns is not None:
            a = a[:, self.columns.start : self.columns.stop].contiguous()
        return a, b

    @property
    def row_numbers(self) -> Tensor:
        """int64, of the whole matrix."""
        starts = accumulate(self.part_sizes, initial=0)
        assert self.rows is not None
        return torch.cat(
            [
                torch.arange(start + rows.start, start + rows.stop)
                for start, rows in zip(starts, self.rows, strict=False)
            ]
        )


def _columns_of(matrix: Matrix, columns: range, name: str) -> Matrix:
    if isinstance(matrix, DenseMatrix):
        return DenseMatrix(matrix.values[:, columns.start : columns.stop].contiguous())
    if isinstance(matrix, StackedMatrix):
        parts = [_columns_of(part, columns, name) for part in matrix.parts]
        assert all(isinstance(part, QuantizedMatrix) for part in parts)
        return StackedMatrix(tuple(parts))  # type: ignore[arg-type]
    if matrix.permutation is not None:
        raise ConfigError(
            f"--tensor-parallel-size: {name} has its columns in the order of their importance "
            "(desc_act), so no rank can have a part of them"
        )
    block = matrix.columns_per_scale
    if block >= matrix.codes.shape[1]:
        scales = slice(None)
        block = len(columns)
    elif columns.start % block or columns.stop % block:
        raise ConfigError(
            f"--tensor-parallel-size: {name} has a scale for each {block} of its "
            f"{matrix.codes.shape[1]:,} columns, which cannot be cut at column "
            f"{columns.start or columns.stop:,}"
        )
    else:
        scales = slice(columns.start // block, columns.stop // block)
    offsets, factors = matrix.offsets, matrix.column_factors
    return replace(
        matrix,
        codes=take_columns(matrix.codes, columns),
        scales=matrix.scales[:, scales].contiguous(),
        offsets=None if offsets is None else offsets[:, scales].contiguous(),
        columns_per_scale=block,
        column_factors=None if factors is None else factors[columns.start : columns.stop],
    )
