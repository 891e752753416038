"""Weights and rows in int8 for the kernels."""

from __future__ import annotations

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
        self.values = torch.empty(num_rows, _padded(size), dtype=torch.uint8)
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


def pack_int8(library: CpuLibrary, codes: Tensor, scales: Tensor) -> Tensor:
    """codes int8 [out_features, in_features] and scales float32 [out_features] as bytes in the
    layout of `linear_int8.inc.c`, in one dimension."""
    out_features, in_features = codes.shape
    assert in_features <= MAX_FEATURES, f"{in_features:,} products may exceed 32 bits"
    codes, scales = codes.contiguous(), scales.contiguous()
    num_columns = -(-out_features // LANES) * LANES
    packed = library.memory.allocate(num_columns * (_HEADER_BYTES + _padded(in_features)))
    args = PackInt8Args(
        packed=packed.data_ptr(),
        codes=codes.data_ptr(),
        scales=scales.data_ptr(),
        in_features=in_features,
        out_features=out_features,
    )
    library.run("pack_int8", args)
    return packed


def _padded(size: int) -> int:
    """Rounded up to `QUAD`."""
    return -(-size // QUAD) * QUAD
