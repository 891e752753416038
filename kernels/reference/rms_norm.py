"""Root-mean-square normalisation, in plain torch: the specification (Zhang and Sennrich, "Root
Mean Square Layer Normalization", 2019)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x / sqrt(mean(x²) + eps) · (weight + offset) over the last dimension; in float32,
    rounded once.

    Args:
        x: [..., size]
        weight: [size]
    """
    if not offset:
        return F.rms_norm(x, weight.shape, weight, eps)
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.rms_norm(x.to(wide), weight.shape, weight.to(wide) + offset, eps).to(x.dtype)


def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The norm of x + residual, and that sum: rounded to the dtype before the norm reads it.

    Args:
        x, residual: [num_rows, size], unchanged
        weight: [size]
    """
    total = x + residual
    return rms_norm_reference(total, weight, eps, offset), total
