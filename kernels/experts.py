"""A mixture of experts: checks shapes, picks the implementation.

The meaning is specified by `kernels.reference.experts`. Routing, grouping and the weighted sum are
a few operations of torch on every device; products are what takes time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.gpu_operations import gpu_operation
from penstock.kernels.linear_quantized import PackedMatrix
from penstock.kernels.quantized_codes import QuantizedCodes
from penstock.kernels.reference.experts import (
    SlotGroups,
    combine_slots_reference,
    experts_linear_reference,
    group_slots,
    route_reference,
)
from penstock.kernels.reference.linear import linear_reference
from penstock.kernels.reference.linear_quantized import linear_quantized_reference

__all__ = ["SlotGroups", "combine_slots", "experts_linear", "group_slots", "route"]


def route(logits: Tensor, experts_per_token: int, *, is_normalized: bool) -> tuple[Tensor, Tensor]:
    """Choose experts; arguments and result as in `route_reference`."""
    assert logits.dim() == 2, f"logits {tuple(logits.shape)}"
    assert logits.dtype == torch.float32, f"{logits.dtype}: ties would be of another rounding"
    assert experts_per_token <= logits.shape[1], f"{experts_per_token} of {logits.shape[1]}"
    return route_reference(logits, experts_per_token, is_normalized=is_normalized)


def experts_linear(
    x: Tensor,
    matrix: Tensor | PackedMatrix,
    groups: SlotGroups,
    bias: Tensor | None = None,
    *,
    in_bytes: bool,
) -> Tensor:
    """Each expert's product with its rows.

    Args:
        x: [num_slots, in_features], in the order of the groups.
        matrix: [num_experts · out_features, in_features], the experts one below the other.
        bias: [num_experts, out_features]
        in_bytes: as in `linear_quantized`, on a CPU; a GPU takes rows as they are.

    Returns:
        [num_slots, out_features], in the same order. A row's bits do not depend on the others.
    """
    num_rows = len(matrix) if isinstance(matrix, Tensor) else matrix.out_features
    out_features, surplus = divmod(num_rows, len(groups.ends))
    assert x.dim() == 2, f"x {tuple(x.shape)}"
    assert len(x) == len(groups.slots), f"{len(x)} rows for {len(groups.slots)} slots"
    assert not surplus, f"{num_rows} rows of {len(groups.ends)} experts"
    assert bias is None or bias.shape == (len(groups.ends), out_features), f"{tuple(bias.shape)}"
    if x.is_cuda:
        run = gpu_operation("experts_linear", "experts")
        output: Tensor = run(x, matrix, groups, bias)
        return output

    def multiply(rows: Tensor, expert: int) -> Tensor:
        own = slice(expert * out_features, (expert + 1) * out_features)
        own_bias = None if bias is None else bias[expert]
        if isinstance(matrix, Tensor):
            return linear_reference(rows, matrix[own], own_bias)
        assert isinstance(matrix, QuantizedCodes), "packed for a GPU"
        return linear_quantized_reference(rows, matrix.part(own), own_bias, in_bytes=in_bytes)

    return experts_linear_reference(x, groups, multiply, out_features)


def combine_slots(
    y: Tensor, groups: SlotGroups, weights: Tensor, others: Tensor | None = None
) -> Tensor:
    """Sum up; arguments and result as in `combine_slots_reference`."""
    assert len(y) == weights.numel(), f"{len(y)} rows, {weights.numel()} weights"
    assert others is None or others.dtype == torch.float32, "added before the result is rounded"
    return combine_slots_reference(y, groups, weights, others)
