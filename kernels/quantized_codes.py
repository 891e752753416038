"""A quantized matrix as kernels take it: unsigned codes of 4 or 8 bits, in blocks of columns."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

BYTE = 127  # largest magnitude of a signed byte that is used


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedCodes:
    """A matrix of numbers ((table[code] or code - zero) · scale - offset) · factor.

    Attributes:
        codes: uint8 [out_features, in_features], less than 16 if `bits` is 4.
        bits: 4 or 8.
        scales: float32 [out_features, ceil(in_features / columns_per_scale)]
        offsets: of the same shape; None: zeros.
        zero: the code that stands for 0.
        table: float32 [16], what codes of 4 bits stand for; None: code - zero.
        is_float8: codes of 8 bits are E4M3 numbers.
        order: int64 [in_features], the input that each column multiplies; None: column j, input j.
        factors: of each column, powers of two in float32 [in_features]; None: ones. Products have
            their inputs multiplied by them instead. A matrix with an order has none.
    """

    codes: Tensor
    bits: int
    scales: Tensor
    offsets: Tensor | None = None
    columns_per_scale: int
    zero: int = 0
    table: Tensor | None = None
    is_float8: bool = False
    order: Tensor | None = None
    factors: Tensor | None = None

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    @property
    def in_features(self) -> int:
        return self.codes.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the codes as kernels store them, and of their scales and offsets in float32."""
        blocks = self.scales.nbytes * (1 if self.offsets is None else 2)
        return self.codes.numel() * self.bits // 8 + blocks

    def rows(self, indices: Tensor) -> Tensor:
        """These rows of the matrix, in float32 and in the order of inputs."""
        return self.part(indices).dequantize()

    def part(self, rows: Tensor | slice) -> QuantizedCodes:
        """The matrix of these rows."""
        offsets = None if self.offsets is None else self.offsets[rows]
        return replace(self, codes=self.codes[rows], scales=self.scales[rows], offsets=offsets)

    def dequantize(self) -> Tensor:
        """float32 [out_features, in_features], in the order of inputs."""
        size = self.columns_per_scale
        numbers = scale_blocks(self.levels(), self.scales, self.offsets, size, self.order)
        return numbers if self.factors is None else numbers.mul_(self.factors)

    def levels(self) -> Tensor:
        """float32 [out_features, in_features]: the numbers before scales and offsets."""
        if self.is_float8:
            return self.codes.view(torch.float8_e4m3fn).float()
        if self.table is not None:
            return self.table[self.codes.long()]
        return self.codes.float() - self.zero

    def with_byte_levels(self) -> QuantizedCodes:
        """The matrix with a table of signed bytes, for exact sums of integers; a table that is no
        multiple of such is rounded to 255 steps."""
        assert not self.is_float8, "floats are no integers"
        if self.table is None:
            return self
        largest = self.table.abs().max().item()
        for multiple in (1.0, 2.0, 4.0):
            levels = self.table * multiple
            if largest * multiple <= BYTE and torch.equal(levels, levels.round()):
                break
        else:
            multiple = BYTE / largest
            levels = (self.table * multiple).round()
        return replace(self, table=levels, scales=self.scales / multiple)


def scale_blocks(
    levels: Tensor,
    scales: Tensor,
    offsets: Tensor | None,
    columns_per_scale: int,
    order: Tensor | None,
) -> Tensor:
    """levels · scales - offsets, in the order of inputs.

    Args:
        levels: float32 [num_rows, in_features], overwritten
        scales, offsets: float32 [num_rows, ceil(in_features / columns_per_scale)]
        order: as in `QuantizedCodes`.
    """

    def spread(values: Tensor) -> Tensor:
        """A value of each block of columns for each of them."""
        num_columns = levels.shape[1]  # a block may be said to be far longer than a row
        return values.repeat_interleave(min(columns_per_scale, num_columns), 1)[:, :num_columns]

    levels *= spread(scales)
    if offsets is not None:
        levels -= spread(offsets)
    return levels if order is None else torch.empty_like(levels).index_copy_(1, order, levels)
