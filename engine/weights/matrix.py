"""A weight matrix between a checkpoint and a backend.

Every format of a checkpoint is read into one of these values, and torch, the C kernels and Triton
each pack them for themselves. So a format knows no backend, and a backend knows no format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from penstock.engine.config import Quantization
from penstock.kernels.quantized_codes import QuantizedCodes, scale_blocks

BLOCK = 32  # columns of a scale; 64 would be faster in 8 bits, but int8 would lose 0.3 %
_NUM_ROWS = 1024  # that are dequantized at once: their copies in float32 are small


class CodeKind(NamedTuple):
    """What quantization at load makes of numbers.

    Attributes:
        bits: of a code, as it is held.
        dtype: of codes in a `QuantizedMatrix`.
        columns_per_scale: None: all of a row.
        has_offsets: beside the scales.
    """

    bits: int
    dtype: torch.dtype
    columns_per_scale: int | None = BLOCK
    has_offsets: bool = False


CODE_KINDS: dict[Quantization, CodeKind] = {
    "int8": CodeKind(8, torch.int8),
    "int4": CodeKind(4, torch.uint8, has_offsets=True),
    "fp8": CodeKind(8, torch.float8_e4m3fn, columns_per_scale=None),
}


@dataclass(frozen=True, slots=True)
class DenseMatrix:
    """Numbers as they are: [out_features, in_features] of a floating-point dtype."""

    values: Tensor

    def dequantize(self) -> Tensor:
        return self.values


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedMatrix:
    """Codes, with a scale and perhaps an offset for each block of them:

        number = ((codebook[code] or code) · scale - offset) · factor of the column

    Attributes:
        codes: [out_features, in_features] of int8, uint8, or float8_e4m3fn.
        scales: float32 [ceil(out_features / rows_per_scale), ceil(in_features / columns_per_scale)]
        offsets: of the same shape; None: zeros.
        codebook: float32 [16], the numbers that the codes 0…15 stand for.
        rows_per_scale, columns_per_scale: the size of a block.
        permutation: int64 [in_features]: column j of all that is above belongs to this input. None:
            to input j.
        column_factors: powers of two, float32 [in_features]; None: ones.
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None = None
    codebook: Tensor | None = None
    rows_per_scale: int = 1
    columns_per_scale: int
    permutation: Tensor | None = None
    column_factors: Tensor | None = None

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

    def block_values(self) -> tuple[Tensor, Tensor | None]:
        """The scales and offsets of each row: [out_features, blocks of columns]."""
        if self.rows_per_scale == 1:
            return self.scales, self.offsets
        rows = torch.arange(len(self.codes)) // self.rows_per_scale
        return self.scales[rows], None if self.offsets is None else self.offsets[rows]

    def for_kernels(self) -> QuantizedCodes:
        """The matrix as kernels take it, its columns in the order of the codes'."""
        codes, (scales, offsets) = self.codes, self.block_values()
        make = partial(
            QuantizedCodes, scales=scales, columns_per_scale=self.columns_per_scale,
            order=self.permutation, factors=self.column_factors,
        )  # fmt: skip
        if codes.dtype == torch.float8_e4m3fn:
            return make(codes=codes.view(torch.uint8), offsets=offsets, bits=8, is_float8=True)
        if self.codebook is not None:
            return make(codes=codes, offsets=offsets, bits=4, table=self.codebook)
        lowest, highest = (each.item() for each in codes.aminmax())
        if codes.dtype == torch.int8:
            bits = 4 if lowest >= -8 and highest < 8 else 8
            zero = 1 << (bits - 1)
            return make(codes=codes.view(torch.uint8) + zero, offsets=offsets, bits=bits, zero=zero)
        zero = self._zero()
        return make(
            codes=codes, offsets=None if zero else offsets, bits=4 if highest < 16 else 8, zero=zero
        )

    def _zero(self) -> int:
        """The code that stands for 0 in all blocks; 0: there is none."""
        scales, offsets = self.block_values()
        if offsets is None:
            return 0
        zero = (offsets.flatten()[0] / scales.flatten()[0]).round().item()
        return int(zero) if 0 < zero < 256 and torch.equal(offsets, scales * zero) else 0

    def _numbers(self, start: int, blocks: Tensor) -> Tensor:
        """The numbers of the rows from `start` on, which are in these rows of blocks."""
        codes = self.codes[start : start + len(blocks)]
        numbers = codes.float() if self.codebook is None else self.codebook[codes.long()]
        offsets = None if self.offsets is None else self.offsets[blocks]
        size = self.columns_per_scale
        numbers = scale_blocks(numbers, self.scales[blocks], offsets, size, self.permutation)
        return numbers if self.column_factors is None else numbers.mul_(self.column_factors)


@dataclass(frozen=True, slots=True)
class StackedMatrix:
    """Matrices whose layouts differ, one below the other, as one."""

    parts: tuple[QuantizedMatrix, ...]

    def dequantize(self) -> Tensor:
        return torch.cat([part.dequantize() for part in self.parts])


Matrix: TypeAlias = DenseMatrix | QuantizedMatrix | StackedMatrix


def rows_of(matrix: Matrix, order: Tensor | slice) -> Matrix:
    """The matrix with row order[i] as row i, order int64 [num_rows]; or of these rows."""
    if isinstance(matrix, DenseMatrix):
        return DenseMatrix(matrix.values[order])
    if isinstance(matrix, StackedMatrix):
        assert isinstance(order, Tensor), "rows of several parts are numbered"
        return _rows_of_parts(matrix.parts, order)
    scales, offsets = matrix.block_values()
    return replace(
        matrix,
        codes=take_rows(matrix.codes, order),
        scales=scales[order],
        offsets=None if offsets is None else offsets[order],
        rows_per_scale=1,
    )


def _rows_of_parts(parts: Sequence[QuantizedMatrix], order: Tensor) -> StackedMatrix:
    """Rows in an order, of matrices of which one stands below the other; `order` ascends from each
    to the next."""
    found, start = [], 0
    for part in parts:
        end = start + len(part.codes)
        rows = rows_of(part, order[(order >= start) & (order < end)] - start)
        assert isinstance(rows, QuantizedMatrix)
        found.append(rows)
        start = end
    return StackedMatrix(tuple(each for each in found if len(each.codes)))


def take_rows(codes: Tensor, order: Tensor | slice) -> Tensor:
    """codes[order], of any dtype: torch does not index E4M3."""
    if codes.dtype == torch.float8_e4m3fn:
        return codes.view(torch.uint8)[order].view(codes.dtype)
    return codes[order]


def take_columns(codes: Tensor, columns: range) -> Tensor:
    """codes[:, columns], of any dtype."""
    raw = codes.view(torch.uint8) if codes.dtype == torch.float8_e4m3fn else codes
    return raw[:, columns.start : columns.stop].contiguous().view(codes.dtype)


def stack(parts: Sequence[Matrix], like: Tensor) -> Matrix:
    """The parts' rows as one matrix, dense if a part is.

    Args:
        like: has the device and dtype of dense values; codes are moved when they are packed.
    """
    quantized = [part for part in parts if isinstance(part, QuantizedMatrix)]
    if len(quantized) < len(parts):
        return DenseMatrix(concatenate([part.dequantize() for part in parts], like))
    joined = tuple(join(list(run)) for _, run in groupby(quantized, _layout))
    return joined[0] if len(joined) == 1 else StackedMatrix(joined)


def _layout(matrix: QuantizedMatrix) -> tuple[object, ...]:
    """What is equal for matrices that can be one."""
    tables = (matrix.codebook, matrix.permutation, matrix.column_factors)
    return (
        matrix.codes.dtype,
        matrix.columns_per_scale,
        matrix.offsets is None,
        *(None if table is None else table.numpy().tobytes() for table in tables),
    )


def join(parts: Sequence[QuantizedMatrix]) -> QuantizedMatrix:
    """The rows of parts with the same layout, where the first one lies."""
    first, blocks = parts[0], [part.block_values() for part in parts]
    if len(parts) == 1 and first.rows_per_scale == 1 and _has_own_memory(first.codes):
        return first
    offsets = [each for _, each in blocks if each is not None]
    like = first.scales.float()
    return QuantizedMatrix(
        codes=concatenate([part.codes for part in parts], first.codes),
        scales=concatenate([scales for scales, _ in blocks], like),
        offsets=concatenate(offsets, like) if offsets else None,
        codebook=first.codebook,
        columns_per_scale=first.columns_per_scale,
        permutation=first.permutation,
        column_factors=first.column_factors,
    )


def _has_own_memory(values: Tensor) -> bool:
    """Whether a tensor is no part of another one, or of a file that is mapped."""
    return values.untyped_storage().nbytes() == values.nbytes


def concatenate(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    """`torch.cat` with the dtype and device of `like`; copies each number once."""
    sizes = [len(part) for part in parts]
    whole = like.new_empty((sum(sizes), *parts[0].shape[1:]))
    for rows, part in zip(torch.split(whole, sizes), parts, strict=True):
        rows.copy_(part)
    return whole
