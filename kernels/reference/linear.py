"""A matrix product whose rows do not depend on each other, in plain torch: the specification.

Only the kernel guarantees that a row's bits depend on that row alone: torch chooses the order of a
sum by the number of rows.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x · weightᵀ + bias, summed in float32 and rounded once.

    Args:
        x: [num_rows, in_features]
        weight: [out_features, in_features]
        bias: [out_features]

    Returns:
        [num_rows, out_features]
    """
    return F.linear(x, weight, bias)
