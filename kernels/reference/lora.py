"""Low-rank updates of rows by their adapters, in plain torch: the specification.

y += scale · B (A x), where A, B and the scale are those of the row's adapter (Hu et al., "LoRA:
Low-Rank Adaptation of Large Language Models", 2021). A step's rows may have different adapters:
each lies in a slot, and rows of one slot are computed together (Chen et al., "Punica", 2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

MAX_GROUP_ROWS = 16


@dataclass(frozen=True, slots=True)
class LoraRows:
    """The rows of a step that have adapters, by slot.

    Attributes:
        order: int64 [num_adapted], numbers of rows; those of one slot lie side by side.
        slots: int64 [num_adapted], of these rows.
        groups: int64 [num_groups, 3]: slot, first and end in `order` of at most `MAX_GROUP_ROWS`
            rows; of none in memory that a captured step reads (`room_for`).
    """

    order: Tensor
    slots: Tensor
    groups: Tensor

    @classmethod
    def of(cls, slots: npt.NDArray[np.int64]) -> LoraRows:
        """slots: of each row, −1 for none."""
        order = slots.argsort(kind="stable")
        order = order[np.searchsorted(slots[order], 0) :]
        found, counts = np.unique(slots[order], return_counts=True)
        ends = counts.cumsum()
        groups = [
            (slot, first, min(first + MAX_GROUP_ROWS, end))
            for slot, start, end in zip(found, ends - counts, ends, strict=True)
            for first in range(start, end, MAX_GROUP_ROWS)
        ]
        table = np.array(groups, dtype=np.int64).reshape(-1, 3)
        return cls(*map(torch.from_numpy, (order, slots[order], table)))

    @classmethod
    def room_for(cls, num_rows: int, num_slots: int, device: torch.device | str) -> LoraRows:
        """Memory for any step of at most so many rows, of adapters in so many slots; none has one
        until `fill`."""
        num_slots = min(num_slots, num_rows)
        num_groups = num_slots + (num_rows - num_slots) // MAX_GROUP_ROWS
        order = torch.zeros(num_rows, dtype=torch.int64, device=device)
        return cls(order, torch.zeros_like(order), order.new_zeros(num_groups, 3))

    def fill(self, rows: LoraRows) -> None:
        """Take a step's rows; groups that are left over have none."""
        for held, given in (
            (self.order, rows.order), (self.slots, rows.slots), (self.groups, rows.groups),
        ):  # fmt: skip
            held[: len(given)].copy_(given)
            held[len(given) :].zero_()

    def to(self, device: torch.device | str) -> LoraRows:
        return LoraRows(*(each.to(device) for each in (self.order, self.slots, self.groups)))


def lora_shrink_reference(x: Tensor, rows: LoraRows, a: Tensor) -> Tensor:
    """A x of the rows that have adapters, summed in float32 and rounded.

    Args:
        x: [num_rows, in_features]
        a: [num_slots, rank, in_features]

    Returns:
        [num_adapted, rank], in `order`
    """
    hidden = x.new_empty(len(rows.order), a.shape[1])
    for slot, first, end in rows.groups.tolist():
        found = x[rows.order[first:end]].float() @ a[slot].float().T
        hidden[first:end] = found.to(x.dtype)
    return hidden


def lora_expand_reference(
    y: Tensor, hidden: Tensor, rows: LoraRows, b: Tensor, scales: Tensor
) -> None:
    """Add scale · B h to the rows that have adapters, in place.

    Args:
        y: [num_rows, out_features]; may be some columns of a larger tensor.
        hidden: [num_adapted, rank], as `lora_shrink` gives it.
        b: [num_slots, out_features, rank]
        scales: float32 [num_slots]
    """
    for slot, first, end in rows.groups.tolist():
        added = scales[slot] * (hidden[first:end].float() @ b[slot].float().T)
        found = rows.order[first:end]
        y[found] = (y[found].float() + added).to(y.dtype)
