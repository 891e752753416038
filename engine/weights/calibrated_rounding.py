"""Rounds a matrix to 4 bits so that its products change least, given what its inputs look like.

Each block of columns has a scale and an offset, as in llama.cpp's Q4_1: number = code · scale -
offset with codes from 0 to 15. `fit_blocks` finds both by the weighted squared error (Gerganov et
al., llama.cpp, `make_qkx2_quants`); `round_columns` rounds column after column, and lets those that
follow make up for the error (Frantar et al., "GPTQ", 2022, algorithm 1).
"""

from __future__ import annotations

import torch
from torch import Tensor

TOP_CODE = 15
_NUM_STEPS = 8  # scales that are tried for a block
_LAZY_COLUMNS = 128  # whose errors are spread to the columns after them at once
_DAMPING = 0.01  # added to the diagonal, in parts of its mean
_LEAST_QUARTERED = 256  # rows of a triangle that is inverted as it is
_SCALE_BITS = 11  # of half-precision numbers, in which kernels keep scales


def fit_blocks(blocks: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and offsets of blocks, each [num_blocks, 1].

    Args:
        blocks: float32 [num_blocks, size], finite
        weights: of the squared errors, positive; of the same shape, or [1, size].
    """
    low = blocks.amin(1, keepdim=True).clamp_(max=0.0)
    high = blocks.amax(1, keepdim=True)
    spread = torch.maximum(high - low, torch.full_like(low, torch.finfo(torch.float32).tiny))
    weights = weights.expand_as(blocks)
    weighted = weights * blocks
    total, sum_x = weights.sum(1, keepdim=True), weighted.sum(1, keepdim=True)
    best_error = torch.full_like(low, torch.inf)
    best_scale, best_offset = torch.zeros_like(low), torch.zeros_like(low)
    for step in range(_NUM_STEPS):
        scale = spread / (TOP_CODE + 0.1 * (step - 1))
        codes = ((blocks - low) / scale).round_().clamp_(0, TOP_CODE)
        # The line through these codes that fits best; at or below zero where codes begin.
        by_code = weights * codes
        sum_c, sum_cc = by_code.sum(1, keepdim=True), (by_code * codes).sum(1, keepdim=True)
        sum_cx = (weighted * codes).sum(1, keepdim=True)
        divisor = total * sum_cc - sum_c * sum_c
        is_line = divisor > 0
        slope = torch.where(is_line, (total * sum_cx - sum_c * sum_x) / divisor, scale)
        start = torch.where(is_line, (sum_cc * sum_x - sum_c * sum_cx) / divisor, low)
        is_above = start > 0
        slope = torch.where(is_above & (sum_cc > 0), sum_cx / sum_cc, slope)
        start = torch.where(is_above, 0.0, start)
        error = (weights * (codes * slope + start - blocks).square_()).sum(1, keepdim=True)
        is_better = error < best_error
        best_error = torch.where(is_better, error, best_error)
        best_scale = torch.where(is_better, slope, best_scale)
        best_offset = torch.where(is_better, -start, best_offset)
    return shorten(best_scale), shorten(best_offset)


def shorten(values: Tensor) -> Tensor:
    """Rounded to as many bits as half-precision numbers have, at any exponent."""
    mantissa, exponent = torch.frexp(values)
    return torch.ldexp(
        torch.ldexp(mantissa, torch.tensor(_SCALE_BITS)).round_(), exponent - _SCALE_BITS
    )


def nearest_codes(values: Tensor, scales: Tensor, offsets: Tensor) -> Tensor:
    """float32 codes from 0 to 15"""
    return ((values + offsets) / scales).nan_to_num_(0.0, 0.0, 0.0).round_().clamp_(0, TOP_CODE)


def round_columns(
    matrix: Tensor, second_moments: Tensor, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """
    Args:
        matrix: float32 [out_features, in_features], finite
        second_moments: of the inputs: xᵀ · x over calibration tokens, float32 [in_features,
            in_features], of which what is below the diagonal is not read.
        size: columns of a block.

    Returns:
        codes uint8 [out_features, in_features]; scales and offsets, each float32 [out_features,
        blocks].
    """
    num_rows, num_columns = matrix.shape
    factor = _error_factor(second_moments)
    spread = factor.diagonal()
    columns = matrix.T.contiguous()  # overwritten with what is still to be rounded
    codes = torch.empty(num_columns, num_rows, dtype=torch.uint8)
    num_blocks = -(-num_columns // size)
    scales, offsets = (torch.empty(num_blocks, num_rows) for _ in range(2))
    for start in range(0, num_columns, _LAZY_COLUMNS):
        end = min(start + _LAZY_COLUMNS, num_columns)
        errors = torch.empty(end - start, num_rows)
        for column in range(start, end):
            block = column // size
            if column % size == 0:
                until = min(column + size, num_columns)
                costs = spread[column:until].square().reciprocal()[None]
                fitted = fit_blocks(columns[column:until].T.contiguous(), costs)
                scales[block], offsets[block] = (each.squeeze(1) for each in fitted)
            values = columns[column]
            code = nearest_codes(values, scales[block], offsets[block])
            codes[column] = code
            error = (values - (code * scales[block] - offsets[block])) / spread[column]
            errors[column - start] = error
            if column + 1 < end:
                later = factor[column, column + 1 : end]
                columns[column + 1 : end].addr_(later, error, alpha=-1.0)
        if end < num_columns:
            columns[end:].addmm_(factor[start:end, end:].T, errors, alpha=-1.0)
    return codes.T.contiguous(), scales.T.contiguous(), offsets.T.contiguous()


def _error_factor(second_moments: Tensor) -> Tensor:
    """The upper Cholesky factor of the inverse: row i says how an error in column i is spread to
    those after it."""
    moments = second_moments.clone()
    diagonal = moments.diagonal()
    diagonal[diagonal <= 0] = 1.0  # inputs that are always zero
    diagonal += _DAMPING * diagonal.mean()
    # moments = factor · factorᵀ, of an upper factor: its inverse is the one that is asked for.
    upper = torch.linalg.cholesky(moments.flip(0, 1)).flip(0, 1).contiguous()
    return _inverse_of_upper(upper)


def _inverse_of_upper(matrix: Tensor) -> Tensor:
    """By quarters, so that most of it is products."""
    size = len(matrix)
    if size <= _LEAST_QUARTERED:
        small: Tensor = torch.linalg.solve_triangular(matrix, torch.eye(size), upper=True)
        return small
    half = size // 2
    inverse = torch.zeros_like(matrix)
    first = inverse[:half, :half] = _inverse_of_upper(matrix[:half, :half])
    last = inverse[half:, half:] = _inverse_of_upper(matrix[half:, half:])
    torch.mm(first @ matrix[:half, half:], -last, out=inverse[:half, half:])
    return inverse
