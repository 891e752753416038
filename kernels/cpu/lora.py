"""The matrices of an adapter as the CPU's operations read them, in the layout of `ops.h`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.cpu.library import LANES
from penstock.kernels.cpu.weight_memory import WeightMemory

CHUNK, MAX_RANK = 1024, 512  # LORA_CHUNK and MAX_LORA_RANK of kernels.c
_NUM_MEMBERS = 4  # of `struct lora_pair`, eight bytes each


def padded_rank(rank: int) -> int:
    return -(-rank // LANES) * LANES


@dataclass(frozen=True, slots=True)
class PackedPair:
    """A and B of one matrix, in panels; they must stay as long as a table points to them.

    Attributes:
        rank: padded.
    """

    a: Tensor
    b: Tensor
    rank: int
    scale: float

    @property
    def num_bytes(self) -> int:
        return self.a.nbytes + self.b.nbytes


def pack_pair(
    a: Tensor, b: Tensor, scale: float, *, memory: WeightMemory, is_lookup: bool = False
) -> PackedPair:
    """
    Args:
        a: [rank, in_features]
        b: [out_features, rank]
        memory: where they go, one after the other, as they are read.
        is_lookup: of an embedding, of which a row of Aᵀ is read for each token.
    """
    rank = padded_rank(len(a))
    a = _padded(a, rank)
    b = torch.nn.functional.pad(b, (0, rank - b.shape[1]))
    packed = a.T if is_lookup else _panels(a)
    panels = _panels(_padded(b, -(-len(b) // LANES) * LANES))
    return PackedPair(_placed(packed, memory), _placed(panels, memory), rank, scale)


def table_of_pairs(num_slots: int, num_parts: int) -> Tensor:
    """An empty table, of `struct lora_pair`s [num_slots, num_parts]."""
    return torch.zeros(num_slots, num_parts, _NUM_MEMBERS, dtype=torch.int64)


def set_pair(table: Tensor, slot: int, part: int, pair: PackedPair | None) -> None:
    """Let a place in a table point to a pair, or to none."""
    members = table[slot, part]
    if pair is None:
        members.zero_()
        return
    members[0], members[1], members[2] = pair.a.data_ptr(), pair.b.data_ptr(), pair.rank
    members[3:].view(torch.float64)[0] = pair.scale


def _panels(matrix: Tensor) -> Tensor:
    """[num_lanes, size] → [num_lanes / 16][size / pair][16][pair]"""
    pair = 2 if matrix.dtype == torch.bfloat16 else 1
    size = matrix.shape[1]
    return matrix.reshape(-1, LANES, size // pair, pair).transpose(1, 2)


def _placed(values: Tensor, memory: WeightMemory) -> Tensor:
    held = memory.allocate(values.nbytes).view(values.dtype).view(values.shape)
    return held.copy_(values)


def _padded(matrix: Tensor, num_rows: int) -> Tensor:
    return torch.nn.functional.pad(matrix, (0, 0, 0, num_rows - len(matrix)))
