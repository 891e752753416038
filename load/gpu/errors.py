"""How far a result is from what it should be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def worst_row(result: Tensor, exact: Tensor) -> float:
    """The largest ‖result − exact‖ ÷ ‖exact‖ of all rows (over the last dimension); NaN if a number
    of the result is."""
    differences = (result.double() - exact).norm(dim=-1)
    return float((differences / exact.norm(dim=-1)).max())


def num_wrong_bytes(result: Tensor, exact: Tensor) -> float:
    """Of two contiguous tensors; a NaN equals itself."""
    return float((result.view(torch.uint8) != exact.view(torch.uint8)).sum())


def bound_of(dtype: torch.dtype) -> float:
    """What `worst_row` may be: numbers are rounded to `dtype` a few times on their way."""
    return 2 * torch.finfo(dtype).eps


def poisoned(call: Callable[[], T]) -> T:
    """The result of a call for which torch fills new tensors with NaN: nothing unwritten looks
    right."""
    settings: Any = torch.utils.deterministic
    assert settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return call()
    finally:
        torch.use_deterministic_algorithms(False)
