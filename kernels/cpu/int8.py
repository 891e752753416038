"""Weights and rows in int8 for the kernels."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from penstock.kernels.cpu.library import LANES, CpuLibrary

QUAD = 4  # as in int8.h
_HEADER_BYTES = 8  # for each column: a first sum and a scale
# 127² · so many stays below 2³¹, where sums end.
MAX_FEATURES = 1 << 17


def row_bytes(size: int) -> int:
    """Size of a row that `quantize_rows` writes."""
    return -(-size // QUAD) * QUAD


def pack_int8(library: CpuLibrary, codes: Tensor, scales: Tensor) -> Tensor:
    """codes int8 [out_features, in_features] and scales float32 [out_features] as bytes in the
    layout of `linear_int8.inc.c`, in one dimension."""
    out_features, in_features = codes.shape
    assert in_features <= MAX_FEATURES, f"{in_features:,} products may exceed 32 bits"
    num_columns = -(-out_features // LANES) * LANES
    packed = library.memory.allocate(num_columns * (_HEADER_BYTES + row_bytes(in_features)))
    sizes: dict[str, Any] = {"in_features": in_features, "out_features": out_features}
    codes, scales = codes.contiguous(), scales.contiguous()
    library.run("pack_int8", packed=packed, codes=codes, scales=scales, **sizes)
    return packed
