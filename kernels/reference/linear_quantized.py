"""Linear layers with quantized weights, in plain torch: the specification.

Inputs are rounded to bytes too (Dettmers et al., "LLM.int8()", 2022, section 2.1, with a scale for
each block of a row instead of a row), or stay as they are. A block's outliers stay as they are
(section 3.2, found anew in each row), so that they do not cost the other columns their precision.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.quantized_codes import BYTE, QuantizedCodes

# 127 · 255 · 512 < 2²⁴: float32 holds every sum of so many products exactly.
_EXACT_FEATURES = 512
MAX_OUTLIER_BLOCK = 128  # columns; longer blocks have none


def quantize_rows_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """Each row as int8 times a scale: its largest magnitude becomes ±127.

    A row of zeros, or of values so small that 127 ÷ the largest overflows, becomes zeros. A row
    with a NaN or an infinity gets that as its scale, so that its results are not finite.

    Args:
        x: [num_rows, size]

    Returns:
        values int8 [num_rows, size] and scales float32 [num_rows]: x ≈ values · scale.
    """
    x = x.float()
    largest = x.abs().amax(dim=1)
    inverse = torch.full_like(largest, BYTE).div(largest).nan_to_num(nan=0.0, posinf=0.0)
    values = (x * inverse[:, None]).nan_to_num_(nan=0.0)
    return values.round_().to(torch.int8), largest / BYTE


def split_outliers(x: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers of each row that are 5 times larger than its mean, and 16 times than that of the
    others: fewer than a fifth.

    Args:
        x: float32 [num_rows, size], a block of columns

    Returns:
        x with zeros in their places, and only them: both float32 [num_rows, size].
    """
    size, nothing = x.shape[1], torch.zeros_like(x)
    if size > MAX_OUTLIER_BLOCK:
        return x, nothing
    magnitudes = x.abs()
    large = 5.0 * magnitudes.sum(1, keepdim=True) / size
    is_large = magnitudes > large
    others = torch.where(is_large, 0.0, magnitudes).sum(1, keepdim=True)
    threshold = 16.0 * others / (size - is_large.sum(1, keepdim=True))
    is_outlier = is_large & (magnitudes > threshold)
    return torch.where(is_outlier, 0.0, x), torch.where(is_outlier, x, nothing)


def linear_quantized_reference(
    x: Tensor, matrix: QuantizedCodes, bias: Tensor | None = None, *, in_bytes: bool
) -> Tensor:
    """x · matrixᵀ (+ bias).

    Args:
        x: [num_rows, in_features]
        bias: [out_features], of x's dtype
        in_bytes: quantize each block of x first, but for its outliers, and sum its products
            exactly; its table, if any, must be `with_byte_levels`.

    Returns:
        [num_rows, out_features], computed in float32 and rounded once to x's dtype.
    """
    size, dtype = matrix.columns_per_scale, x.dtype
    if matrix.order is not None:
        x = x[:, matrix.order]
    if matrix.factors is not None:
        x = x * matrix.factors.to(dtype)
    result = torch.zeros(len(x), matrix.out_features, device=x.device)
    blocks = (torch.split(each, size, dim=1) for each in (x, matrix.levels()))
    for block, (columns, levels) in enumerate(zip(*blocks, strict=True)):
        if in_bytes:
            rest, outliers = split_outliers(columns.float())
            values, scales = quantize_rows_reference(rest)
            sums = _sums(values, levels).float() * scales[:, None] + outliers @ levels.T
            total = values.int().sum(dim=1).float() * scales + outliers.sum(dim=1)
        else:
            sums, total = columns.float() @ levels.T, columns.float().sum(dim=1)
        result += sums * matrix.scales[:, block]
        if matrix.offsets is not None:
            result -= total[:, None] * matrix.offsets[:, block]
    if bias is not None:
        result += bias.float()
    return result.to(dtype)


def _sums(left: Tensor, right: Tensor) -> Tensor:
    """left · rightᵀ of integers, int32 [num_rows, out_features]"""
    sums = left.new_zeros((len(left), len(right)), dtype=torch.int32)
    parts = (torch.split(each, _EXACT_FEATURES, dim=1) for each in (left, right))
    for left_part, right_part in zip(*parts, strict=True):
        sums += torch.mm(left_part.float(), right_part.float().T).int()
    return sums
