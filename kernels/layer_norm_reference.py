"""Layer normalisation, in plain torch: the specification (Ba et al., "Layer Normalization",
2016)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """(x − mean(x)) / sqrt(var(x) + eps) · weight + bias over the last dimension, with the biased
    variance; computed in float32, rounded once.

    Args:
        x: [num_rows, size]
        weight, bias: [size]
    """
    return F.layer_norm(x, weight.shape, weight, bias, eps)
