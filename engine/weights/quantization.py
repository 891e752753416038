"""Quantization at load: what `--quantization` makes of the matrices of a model's layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import torch
from torch import Tensor

from penstock.engine.config import Quantization
from penstock.engine.weights.matrix import Matrix, QuantizedMatrix, stack
from penstock.kernels.linear_int8_reference import quantize_rows_reference

_NUM_VALUES = 1 << 17  # at once: their copies in float32 stay in the cache


def _to_int8(parts: Sequence[Matrix], like: Tensor) -> Matrix:
    """As if the whole `stack` were quantized."""
    values = [part.dequantize() for part in parts]
    num_rows, size = sum(map(len, values)), values[0].shape[1]
    codes = like.new_empty((num_rows, size), dtype=torch.int8)
    scales = like.new_empty(num_rows, dtype=torch.float32)
    chunks = (torch.split(each, max(1, _NUM_VALUES // size)) for each in values)
    start = 0
    for rows in chain.from_iterable(chunks):
        end = start + len(rows)
        codes[start:end], scales[start:end] = quantize_rows_reference(rows.to(like.dtype))
        start = end
    return QuantizedMatrix(codes=codes, scales=scales[:, None], columns_per_scale=size)


Quantizer = Callable[[Sequence[Matrix], Tensor], Matrix]
QUANTIZERS: dict[Quantization, Quantizer] = {"none": stack, "int8": _to_int8}
