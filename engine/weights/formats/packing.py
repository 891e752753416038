"""Several codes in one integer, and 4-bit floating-point numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# E2M1: a sign, two bits of exponent, one of mantissa (OCP Microscaling Formats, 2023, 5.3.3).
FP4 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def unpack(packed: Tensor, bits: int, *, dim: int, order: Sequence[int] = ()) -> Tensor:
    """The codes in 32-bit integers, the first in the lowest bits.

    Args:
        packed: int32 of two dimensions; each holds 32 / bits codes.
        dim: along which they were packed.
        order: where the codes of an integer belong among them; as they come, if it is empty.

    Returns:
        uint8, `dim` 32 / bits times as long
    """
    count = 32 // bits
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    wide = packed.unsqueeze(dim + 1)
    shape = [1, 1, 1]
    shape[dim + 1] = count
    codes = (wide >> shifts.view(shape) & ((1 << bits) - 1)).to(torch.uint8)
    if order:
        codes = codes.index_select(dim + 1, torch.tensor(order).argsort())
    return codes.flatten(dim, dim + 1)


def unpack_nibbles(packed: Tensor, *, high_first: bool = False) -> Tensor:
    """The codes in bytes [rows, columns / 2], uint8 [rows, columns]."""
    halves = (packed >> 4, packed & 15) if high_first else (packed & 15, packed >> 4)
    return torch.stack(halves, dim=-1).flatten(-2)


def e8m0(exponents: Tensor) -> Tensor:
    """Powers of two as bytes, in float32 (OCP Microscaling Formats, section 5.4.1)."""
    return torch.exp2(exponents.float() - 127)
