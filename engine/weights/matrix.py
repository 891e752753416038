"""A weight matrix between a checkpoint and a backend.

Every format of a checkpoint is read into one of these values, and torch, the C kernels and Triton
each pack them for themselves. So a format knows no backend, and a backend knows no format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeGuard

import torch
from torch import Tensor

_NUM_ROWS = 1024  # that are dequantized at once: their copies in float32 are small


@dataclass(frozen=True, slots=True)
class DenseMatrix:
    """Numbers as they are: [out_features, in_features] of a floating-point dtype."""

    values: Tensor

    def dequantize(self) -> Tensor:
        return self.values


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedMatrix:
    """Codes, with a scale and perhaps an offset for each block of them:

        number = (codebook[code] or code) · scale - offset

    Attributes:
        codes: [out_features, in_features] of int8, uint8, or float8_e4m3fn.
        scales: float32 [ceil(out_features / rows_per_scale), ceil(in_features / columns_per_scale)]
        offsets: of the same shape; None: zeros.
        codebook: float32 [16], the numbers that the codes 0…15 stand for.
        rows_per_scale, columns_per_scale: the size of a block.
        permutation: int64 [in_features]: column j of all that is above belongs to this input. None:
            to input j.
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None = None
    codebook: Tensor | None = None
    rows_per_scale: int = 1
    columns_per_scale: int
    permutation: Tensor | None = None

    def __post_init__(self) -> None:
        rows, columns = self.codes.shape
        blocks = (-(-rows // self.rows_per_scale), -(-columns // self.columns_per_scale))
        assert self.scales.shape == blocks, f"scales {tuple(self.scales.shape)}, {blocks}"
        assert self.offsets is None or self.offsets.shape == blocks, f"{tuple(self.offsets.shape)}"

    def dequantize(self) -> Tensor:
        """float32 [out_features, in_features]: the numbers that the codes stand for."""
        values = torch.empty(self.codes.shape)
        for start in range(0, len(values), _NUM_ROWS):
            rows = torch.arange(start, min(start + _NUM_ROWS, len(values)))
            values[start : start + _NUM_ROWS] = self._numbers(start, rows // self.rows_per_scale)
        return values

    def _numbers(self, start: int, blocks: Tensor) -> Tensor:
        """Of the rows from `start` on, which are in these rows of blocks."""
        codes = self.codes[start : start + len(blocks)]
        numbers = codes.float() if self.codebook is None else self.codebook[codes.long()]
        numbers *= self._spread(self.scales[blocks])
        if self.offsets is not None:
            numbers -= self._spread(self.offsets[blocks])
        if self.permutation is None:
            return numbers
        return torch.empty_like(numbers).index_copy_(1, self.permutation, numbers)

    def _spread(self, values: Tensor) -> Tensor:
        """A value of each block of columns for each of them."""
        spread = values.repeat_interleave(self.columns_per_scale, dim=1)
        return spread[:, : self.codes.shape[1]]


Matrix: TypeAlias = DenseMatrix | QuantizedMatrix


def is_int8_by_row(matrix: Matrix) -> TypeGuard[QuantizedMatrix]:
    """Whether it is int8 with a scale for each row, for which there are kernels that round their
    inputs to int8, too."""
    return (
        isinstance(matrix, QuantizedMatrix)
        and matrix.codes.dtype == torch.int8
        and (matrix.rows_per_scale, matrix.columns_per_scale) == (1, matrix.codes.shape[1])
        and matrix.offsets is matrix.permutation is matrix.codebook is None
    )


def stack(parts: Sequence[Matrix], like: Tensor) -> Matrix:
    """The parts' rows as one matrix, dense unless all parts are int8 by row.

    Args:
        like: has the device, and the dtype of dense values.
    """
    quantized = [part for part in parts if is_int8_by_row(part)]
    if len(quantized) < len(parts):
        return DenseMatrix(concatenate([part.dequantize() for part in parts], like))
    return QuantizedMatrix(
        codes=concatenate([part.codes for part in quantized], like.to(torch.int8)),
        scales=concatenate([part.scales for part in quantized], like.float()),
        columns_per_scale=quantized[0].columns_per_scale,
    )


def concatenate(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    """`torch.cat` with the dtype and device of `like`; copies each number once."""
    sizes = [len(part) for part in parts]
    whole = like.new_empty((sum(sizes), *parts[0].shape[1:]))
    for rows, part in zip(torch.split(whole, sizes), parts, strict=True):
        rows.copy_(part)
    return whole
