"""Root-mean-square normalisation, alone and of a sum: checks shapes, picks the implementation.

The meaning is specified by `rms_norm_reference`. On a GPU the addition to the residual stream is
part of the same launch, so the stream is read and written once.
"""

from __future__ import annotations

from torch import Tensor

from penstock.kernels.gpu_operations import gpu_operation
from penstock.kernels.reference.rms_norm import add_rms_norm_reference, rms_norm_reference


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """The norm of each row of x [num_rows, size]; see `rms_norm_reference`."""
    _check(x, weight)
    run = gpu_operation("rms_norm") if x.is_cuda else rms_norm_reference
    normed: Tensor = run(x, weight, eps, offset)
    return normed


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The norm of each row of x + residual, and the sum; see `add_rms_norm_reference`."""
    _check(x, weight)
    assert residual.shape == x.shape, f"{tuple(x.shape)} + {tuple(residual.shape)}"
    assert residual.dtype == x.dtype, f"{x.dtype} + {residual.dtype}"
    run = gpu_operation("add_rms_norm", "rms_norm") if x.is_cuda else add_rms_norm_reference
    normed, total = run(x, residual, weight, eps, offset)
    return normed, total


def _check(x: Tensor, weight: Tensor) -> None:
    assert x.dim() == 2, f"rows {tuple(x.shape)}"
    assert weight.shape == x.shape[1:], f"weight {tuple(weight.shape)} for {tuple(x.shape)}"
