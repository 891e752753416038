"""Layer normalisation, in plain torch: the specification (Ba et al., "Layer Normalization",
2016)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def layer_norm_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, num_groups: int = 1
) -> Tensor:
    """(x − mean(x)) / sqrt(var(x) + eps) · weight + bias over the last dimension, or over each of
    the groups of equal size that it consists of; with the biased variance; computed in float32,
    rounded once.

    Args:
        x: [num_rows, size]
        weight, bias: [size]
    """
    if num_groups == 1:
        return F.layer_norm(x, weight.shape, weight, bias, eps)
    wide = torch.promote_types(x.dtype, torch.float32)
    groups = x.to(wide).view(len(x), num_groups, -1)
    normed = F.layer_norm(groups, groups.shape[2:], eps=eps).flatten(1) * weight.to(wide)
    return (normed if bias is None else normed + bias.to(wide)).to(x.dtype)
