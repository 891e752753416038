"""Tensors seen as plain bits, for operations that only move them."""

from __future__ import annotations

import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_bits(x: Tensor) -> Tensor:
    """A view of the memory as integers: every NaN keeps its payload, and any dtype can be moved."""
    return x.view(_INTEGERS[x.itemsize])
