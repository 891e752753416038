"""Quantized weights, and rows rounded to bytes, for the kernels of `linear_quantized.inc.c`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.kernels.cpu.library import LANES, CpuLibrary
from penstock.kernels.quantized_codes import QuantizedCodes
from penstock.kernels.reference.linear_quantized import MAX_OUTLIER_BLOCK

# 127 · 128 · so many stays below 2³¹, where sums end.
MAX_FEATURES = 1 << 17
_LINE_BYTES = 64
_NIBBLE_LINE = 8  # columns of a line of 4 bits; half as many of 8
_SHORT_BLOCK = 64  # up to which scales are stored in half precision
_HALF_EXPONENT = 14  # 2¹⁴ is far from the largest half-precision number, 65,504


class PackedCodes:
    """A matrix as the kernels read it.

    Args:
        matrix: with a table of bytes, if any, where `in_bytes`; its `order` is the caller's affair.
        in_bytes: for products with rows that are rounded to bytes; otherwise with rows as they are.

    Attributes:
        weight: the bytes, in one dimension.
    """

    def __init__(self, library: CpuLibrary, matrix: QuantizedCodes, *, in_bytes: bool) -> None:
        size = matrix.in_features
        assert size <= MAX_FEATURES, f"{size:,} products may exceed 32 bits"
        assert can_pack(matrix, in_bytes=in_bytes), "blocks would end within a line"
        self.in_features, self.out_features = size, matrix.out_features
        self.in_bytes = in_bytes
        self.columns_per_scale = min(matrix.columns_per_scale, size)
        self.has_offsets = matrix.offsets is not None
        self.num_blocks = matrix.scales.shape[1]
        self.code_bits = matrix.bits
        self.zero = 128 if in_bytes and matrix.table is not None else matrix.zero
        self.line = _NIBBLE_LINE * 4 // matrix.bits
        is_half = self.columns_per_scale <= _SHORT_BLOCK and library.dtype != torch.float32
        factors, scales, offsets = _scales(matrix, is_half)
        self._format: dict[str, Any] = {
            "code_bits": matrix.bits,
            "columns_per_scale": self.columns_per_scale,
            "zero": self.zero,
            "has_offsets": int(self.has_offsets),
            "is_half": int(is_half),
            "is_float8": int(matrix.is_float8),
        }
        self.float_table = None
        if matrix.bits == 4:
            table = matrix.table
            self.float_table = torch.arange(16.0) - matrix.zero if table is None else table
        self.table = self.float_table
        if in_bytes:
            self.table = None if matrix.table is None else (matrix.table + 128).to(torch.uint8)
        self.weight = library.memory.allocate(self._num_bytes(library, scales))
        library.run(
            "pack_quantized", packed=self.weight, codes=matrix.codes.contiguous(), factors=factors,
            scales=scales, offsets=offsets, in_features=size, out_features=self.out_features,
            **self._format,
        )  # fmt: skip

    def arguments(self) -> dict[str, Any]:
        """Those of `linear_quantized` that do not depend on the rows."""
        sizes = {"in_features": self.in_features, "out_features": self.out_features}
        return {
            "weight": self.weight, "table": self.table, "most_outliers": self.most_outliers,
            **sizes, **self._format,
        }  # fmt: skip

    @property
    def most_outliers(self) -> int:
        """Room for a row's, and for the end of their list."""
        return self.in_features // 5 + 1

    def embed_arguments(self) -> dict[str, Any]:
        """Those of `embed_quantized` that do not depend on the tokens."""
        sizes = {"size": self.in_features}
        return {"weight": self.weight, "table": self.float_table, **sizes, **self._format}

    @property
    def rounded_rows(self) -> dict[str, tuple[int, torch.dtype]]:
        """What `linear_quantized` takes of rows that are rounded to bytes, by argument: how many
        numbers for each row, and their dtype."""
        sizes = {
            "x": (self.row_bytes, torch.uint8),
            "x_scales": (self.num_blocks, torch.float32),
            "x_sums": (self.num_blocks, torch.int32),
        }
        if self.has_offsets:
            sizes["x_float_sums"] = (self.num_blocks, torch.float32)
        if self.columns_per_scale <= MAX_OUTLIER_BLOCK:
            sizes["outlier_columns"] = (self.most_outliers, torch.int32)
            sizes["outlier_values"] = (self.most_outliers, torch.float32)
        return sizes

    @property
    def row_bytes(self) -> int:
        """Size of a row that `quantize_blocks` writes."""
        return -(-self.in_features // self.line) * self.line

    def _num_bytes(self, library: CpuLibrary, scales: Tensor) -> int:
        lines = self.row_bytes // self.line * _LINE_BYTES // LANES
        of_column = 4 + lines + self.num_blocks * scales.itemsize * (2 if self.has_offsets else 1)
        return -(-self.out_features // library.group_lanes) * library.group_lanes * of_column


def can_pack(matrix: QuantizedCodes, *, in_bytes: bool) -> bool:
    """Whether the kernels can multiply it: a line must not reach into the next block, nor, if rows
    are as they are, past their end."""
    line, size = _NIBBLE_LINE * 4 // matrix.bits, matrix.in_features
    if matrix.is_float8 and in_bytes:
        return False
    is_one_block = matrix.columns_per_scale >= size
    return (is_one_block or matrix.columns_per_scale % line == 0) and (in_bytes or size % line == 0)


def _scales(matrix: QuantizedCodes, is_half: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Factors [out_features], and scales and offsets in half precision or float32. Factors are
    powers of two, so that the scales of most checkpoints stay exact."""
    scales, offsets = matrix.scales.contiguous(), matrix.offsets
    if not is_half:
        return torch.ones(len(scales)), scales, None if offsets is None else offsets.contiguous()
    largest = scales.abs().amax(dim=1)
    if offsets is not None:
        largest = torch.maximum(largest, offsets.abs().amax(dim=1))
    factors = torch.ldexp(torch.ones(len(scales)), torch.frexp(largest).exponent - _HALF_EXPONENT)
    halves = (scales / factors[:, None]).half()
    return factors, halves, None if offsets is None else (offsets / factors[:, None]).half()
