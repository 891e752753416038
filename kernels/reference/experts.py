"""A mixture of experts, in plain torch: the specification (Shazeer et al., "Outrageously Large
Neural Networks", 2017; Jiang et al., "Mixtral of Experts", 2024).

Each token goes to a few experts. A *slot* is one token at one of its experts: token t has the slots
t · experts_per_token + rank, best expert first. Products run over slots sorted by expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SlotGroups:
    """Slots sorted by expert, and by number within an expert.

    Attributes:
        slots: int64 [num_slots]
        places: int64 [num_slots], where each slot is in `slots`.
        ends: int64 [num_experts], where each expert's slots end.
        experts_per_token: slots of a token.
    """

    slots: Tensor
    places: Tensor
    ends: Tensor
    experts_per_token: int

    @property
    def tokens(self) -> Tensor:
        """The token of each sorted slot."""
        return self.slots // self.experts_per_token


def route_reference(
    logits: Tensor, experts_per_token: int, *, is_normalized: bool
) -> tuple[Tensor, Tensor]:
    """The experts of each token, and their weights.

    Args:
        logits: float32 [num_tokens, num_experts]
        is_normalized: a token's weights sum to 1; otherwise they are shares among all experts.

    Returns:
        experts int64 [num_tokens, experts_per_token], by falling logit, of equal ones the one with
        the lower number first; and weights float32 of the same shape.
    """
    ordered, experts = torch.sort(logits, dim=1, descending=True, stable=True)
    chosen = ordered[:, :experts_per_token]
    weights = torch.softmax(chosen if is_normalized else ordered, dim=1)
    return experts[:, :experts_per_token], weights[:, :experts_per_token]


def group_slots(experts: Tensor, num_experts: int) -> SlotGroups:
    """experts int64 [num_tokens, experts_per_token]; on any device, without waiting for it."""
    of_slots = experts.flatten()
    slots = torch.argsort(of_slots, stable=True)
    places = torch.empty_like(slots).scatter_(
        0, slots, torch.arange(len(slots), device=slots.device)
    )
    numbers = torch.arange(num_experts, device=slots.device)
    ends = torch.searchsorted(of_slots[slots], numbers, right=True)
    return SlotGroups(slots, places, ends, experts.shape[1])


def experts_linear_reference(
    x: Tensor, groups: SlotGroups, multiply: Callable[[Tensor, int], Tensor], out_features: int
) -> Tensor:
    """Each expert's product with its rows.

    Args:
        x: [num_slots, in_features], in the order of the groups.
        multiply: (rows, expert) → their product, [num_rows, out_features].

    Returns:
        [num_slots, out_features], in the same order.
    """
    y = x.new_empty(len(x), out_features)
    start = 0
    for expert, end in enumerate(groups.ends.tolist()):
        if end > start:
            y[start:end] = multiply(x[start:end], expert)
        start = end
    return y


def clamped_swiglu_reference(gate_up: Tensor, *, alpha: float, limit: float) -> Tensor:
    """gate · sigmoid(alpha · gate) · (up + 1) of gates up to `limit`, and ups from -limit to limit
    (OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025, section 2.2).

    Args:
        gate_up: [num_rows, 2 · size], gate and up concatenated

    Returns:
        [num_rows, size], rounded once.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * torch.sigmoid(alpha * gate) * (up + 1)).to(gate_up.dtype)


def combine_slots_reference(
    y: Tensor, groups: SlotGroups, weights: Tensor, others: Tensor | None = None
) -> Tensor:
    """Each token's weighted sum over its experts, in the order of their ranks, rounded once.

    Args:
        y: [num_slots, size], in the order of the groups.
        weights: float32 [num_tokens, experts_per_token]
        others: float32 [num_tokens, size], added last.

    Returns:
        [num_tokens, size], of y's dtype.
    """
    total = torch.zeros(len(weights), y.shape[1], device=y.device)
    places = groups.places.view(len(weights), -1)
    for rank in range(groups.experts_per_token):
        total += weights[:, rank, None] * y[places[:, rank]].float()
    return (total if others is None else total + others).to(y.dtype)
