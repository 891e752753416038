"""Layer normalisation: checks shapes, picks the implementation.

The meaning is specified by `layer_norm_reference`.
"""

from __future__ import annotations

from torch import Tensor

from penstock.kernels.gpu_operations import gpu_operation
from penstock.kernels.reference.layer_norm import layer_norm_reference


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, num_groups: int = 1
) -> Tensor:
    """The norm of each row of x [num_rows, size], or of its groups; see `layer_norm_reference`."""
    assert x.dim() == 2, f"rows {tuple(x.shape)}"
    assert x.shape[1] % num_groups == 0, f"{tuple(x.shape)} in {num_groups} groups"
    for parameter in (weight, bias):
        assert parameter is None or parameter.shape == x.shape[1:], f"{tuple(parameter.shape)}"
    run = gpu_operation("layer_norm") if x.is_cuda else layer_norm_reference
    normed: Tensor = run(x, weight, bias, eps, num_groups)
    return normed
