"""Weights and rows in int8 for the kernels."""

from __future__ import annotations

import ctypes
from ctypes import addressof

import torch
from torch import Tensor

from penstock.kernels.cpu.library import LANES, CpuLibrary
from penstock.kernels.cpu.structures import PackInt8Args, QuantizeRowsArgs

QUAD = 4  # as in int8.h
_HEADER_BYTES = 8  # for each column: a first sum and a scale
# 127² · so many stays below 2³¹, where sums end.
MAX_FEATURES = 1 << 17


class Int8Rows:
    """A buffer for the output of `quantize_rows`.

    Attributes:
        values: uint8 [num_rows, size rounded up to QUAD]; 128 represents 0.
        scales: float32 [num_rows]
    """

    def __init__(self, num_rows: int, size: int) -> None:
        self.values = torch.empty(num_rows, -(-size // QUAD) * QUAD, dtype=torch.uint8)
        self.scales = torch.empty(num_rows)

    def args(self, x: Tensor, num_rows: int) -> QuantizeRowsArgs:
        """x [num_rows, size], contiguous, no larger than the buffer; num_rows: its address."""
        return QuantizeRowsArgs(
            bytes=self.values.data_ptr(),
            scales=self.scales.data_ptr(),
            x=x.data_ptr(),
            num_rows=num_rows,
            size=x.shape[1],
        )


def pack_int8(library: CpuLibrary, weight: Tensor) -> Tensor:
    """Quantize weight [out_features, in_features], of the library's dtype, row by row; returns
    bytes in the layout of `linear_int8.inc.c`, in one dimension."""
    out_features, in_features = weight.shape
    assert in_features <= MAX_FEATURES, f"{in_features:,} products may exceed 32 bits"
    weight = weight.contiguous()
    rows, num_rows = Int8Rows(out_features, in_features), ctypes.c_int64(out_features)
    library.run("quantize_rows", rows.args(weight, addressof(num_rows)))
    num_columns = -(-out_features // LANES) * LANES
    packed = library.memory.allocate(num_columns * (_HEADER_BYTES + rows.values.shape[1]))
    args = PackInt8Args(
        packed=packed.data_ptr(),
        bytes=rows.values.data_ptr(),
        scales=rows.scales.data_ptr(),
        in_features=in_features,
        out_features=out_features,
    )
    library.run("pack_int8", args)
    return packed
