"""Products with quantized weights, and lookups in tables of them: checks, picks the implementation.

The meaning is specified by `linear_quantized_reference`.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from penstock.kernels.gpu.quantized import GpuCodes, pack_codes
from penstock.kernels.gpu_operations import gpu_operation
from penstock.kernels.quantized_codes import QuantizedCodes
from penstock.kernels.reference.linear_quantized import linear_quantized_reference

PackedMatrix: TypeAlias = QuantizedCodes | GpuCodes


def pack_for(like: Tensor, matrix: QuantizedCodes, *, in_bytes: bool) -> PackedMatrix:
    """The matrix as the operations here read it on the device of `like`.

    Args:
        like: has the dtype of the rows too.
        in_bytes: as in `linear_quantized`.
    """
    if like.is_cuda:
        return pack_codes(matrix, like)
    return matrix.with_byte_levels() if in_bytes else matrix


def linear_quantized(
    x: Tensor,
    matrix: PackedMatrix,
    bias: Tensor | None = None,
    *,
    in_bytes: bool,
    is_invariant: bool = False,
) -> Tensor:
    """x · matrixᵀ (+ bias), [num_rows, out_features]; other arguments as in
    `linear_quantized_reference`.

    Args:
        in_bytes: round x. On a GPU only products with 8 bits do: with integers, where each block
            of a row is rounded to signed bytes; and with E4M3 numbers of which each row has one
            scale, where torch multiplies such with rows in E4M3.
        is_invariant: a row's bits do not depend on the other rows; on a GPU.
    """
    assert x.dim() == 2, f"x {tuple(x.shape)}"
    assert x.shape[1] == matrix.in_features, f"{tuple(x.shape)} by {matrix.in_features} features"
    assert bias is None or bias.shape == (matrix.out_features,), "one bias for each output"
    if isinstance(matrix, QuantizedCodes):
        return linear_quantized_reference(x, matrix, bias, in_bytes=in_bytes)
    run = gpu_operation("linear_quantized")
    output: Tensor = run(x, matrix, bias, in_bytes=in_bytes, is_invariant=is_invariant)
    return output


def embed_quantized(token_ids: Tensor, matrix: PackedMatrix, dtype: torch.dtype) -> Tensor:
    """token_ids [num_tokens] → these rows of the matrix, [num_tokens, in_features] of `dtype`"""
    assert token_ids.dim() == 1, f"token_ids {tuple(token_ids.shape)}"
    if isinstance(matrix, QuantizedCodes):
        return matrix.rows(token_ids).to(dtype)
    output: Tensor = gpu_operation("embed_quantized", "linear_quantized")(token_ids, matrix, dtype)
    return output
