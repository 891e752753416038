"""A weight matrix between a checkpoint and a backend.

Every format of a checkpoint is read into one of these values, and torch, the C kernels and Triton
each pack them for themselves. So a format knows no backend, and a backend knows no format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DenseMatrix:
    """Numbers as they are: [out_features, in_features] of a floating-point dtype."""

    values: Tensor

    def dequantize(self) -> Tensor:
        return self.values


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedMatrix:
    """Integers with a scale for each row. Inputs are rounded to int8, too, when it multiplies.

    Attributes:
        codes: int8 [out_features, in_features]
        scales: float32 [out_features]
    """

    codes: Tensor
    scales: Tensor

    def dequantize(self) -> Tensor:
        """float32 [out_features, in_features]: the numbers that the codes stand for."""
        return self.codes * self.scales[:, None]


Matrix: TypeAlias = DenseMatrix | QuantizedMatrix


def stack(parts: Sequence[Matrix], like: Tensor) -> Matrix:
    """The parts' rows as one matrix, dense unless all parts are quantized.

    Args:
        like: has the device, and the dtype of dense values.
    """
    quantized = [part for part in parts if isinstance(part, QuantizedMatrix)]
    if len(quantized) < len(parts):
        return DenseMatrix(concatenate([part.dequantize() for part in parts], like))
    return QuantizedMatrix(
        codes=concatenate([part.codes for part in quantized], like.to(torch.int8)),
        scales=concatenate([part.scales for part in quantized], like.float()),
    )


def concatenate(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    """`torch.cat` with the dtype and device of `like`; copies each number once."""
    sizes = [len(part) for part in parts]
    whole = like.new_empty((sum(sizes), *parts[0].shape[1:]))
    for rows, part in zip(torch.split(whole, sizes), parts, strict=True):
        rows.copy_(part)
    return whole
