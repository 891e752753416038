"""Linear layers in int8, in plain torch: the specification (Dettmers et al., "LLM.int8()", 2022,
section 2.1: a scale for each row of the input and of the weight; no separate outliers).
"""

from __future__ import annotations

import torch
from torch import Tensor

# 127² · 1024 < 2²⁴: float32 holds every sum of so many products exactly.
_EXACT_FEATURES = 1024


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
    inverse = torch.full_like(largest, 127.0).div(largest).nan_to_num(nan=0.0, posinf=0.0)
    values = (x * inverse[:, None]).nan_to_num_(nan=0.0)
    return values.round_().to(torch.int8), largest / 127.0


def linear_int8_reference(
    x: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None
) -> Tensor:
    """x · weightᵀ (+ bias), x quantized row by row first: exact sums of int8 products, scaled.

    Args:
        x: [num_rows, in_features]
        weight: int8 [out_features, in_features]
        weight_scales: float32 [out_features]
        bias: [out_features], of x's dtype

    Returns:
        [num_rows, out_features], computed in float32 and rounded once to x's dtype.
    """
    values, scales = quantize_rows_reference(x)
    result = _sums(values, weight).float() * scales[:, None] * weight_scales
    if bias is not None:
        result += bias.float()
    return result.to(x.dtype)


def _sums(left: Tensor, right: Tensor) -> Tensor:
    """left · rightᵀ of int8, int32 [num_rows, out_features]"""
    sums = left.new_zeros((len(left), len(right)), dtype=torch.int32)
    parts = (torch.split(each, _EXACT_FEATURES, dim=1) for each in (left, right))
    for left_part, right_part in zip(*parts, strict=True):
        sums += torch.mm(left_part.float(), right_part.float().T).int()
    return sums
