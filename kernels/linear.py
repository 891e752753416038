"""A matrix product whose rows do not depend on each other: checks, picks the implementation.

Only used where results must not depend on the batch; torch's product is faster. The meaning is
specified by `linear_reference`.
"""

from __future__ import annotations

from torch import Tensor

from penstock.kernels.gpu_operations import gpu_operation
from penstock.kernels.reference.linear import linear_reference


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply; arguments and result as in `linear_reference`."""
    assert x.dim() == 2, f"x {tuple(x.shape)}"
    assert x.shape[1] == weight.shape[1], f"{tuple(x.shape)} by {tuple(weight.shape)}"
    assert x.dtype == weight.dtype, f"{x.dtype} by {weight.dtype}"
    assert bias is None or bias.shape == weight.shape[:1], "one bias for each output"
    run = gpu_operation("linear") if x.is_cuda else linear_reference
    output: Tensor = run(x, weight, bias)
    return output
