"""Low-rank updates of rows by their adapters: checks shapes, picks the implementation.

The meaning is specified by `kernels.reference.lora`. The program of a CPU has operations of its own
(`kernels.cpu.lora`).
"""

from __future__ import annotations

from torch import Tensor

from penstock.kernels.gpu_operations import gpu_operation
from penstock.kernels.reference.lora import (
    LoraRows,
    lora_expand_reference,
    lora_shrink_reference,
)


def lora_shrink(x: Tensor, rows: LoraRows, a: Tensor) -> Tensor:
    """A x of the rows that have adapters; see `lora_shrink_reference`."""
    assert x.shape[1:] == a.shape[2:], f"x {tuple(x.shape)} by {tuple(a.shape)}"
    assert x.dtype == a.dtype, f"{x.dtype} by {a.dtype}"
    run = gpu_operation("lora_shrink", "lora") if x.is_cuda else lora_shrink_reference
    hidden: Tensor = run(x, rows, a)
    return hidden


def lora_expand(y: Tensor, hidden: Tensor, rows: LoraRows, b: Tensor, scales: Tensor) -> None:
    """Add scale · B h to the rows that have adapters; see `lora_expand_reference`."""
    assert b.shape[1:] == (y.shape[1], hidden.shape[1]), (
        f"{tuple(hidden.shape)} by {tuple(b.shape)}"
    )
    assert y.dtype == hidden.dtype == b.dtype, f"{hidden.dtype} by {b.dtype} to {y.dtype}"
    run = gpu_operation("lora_expand", "lora") if y.is_cuda else lora_expand_reference
    run(y, hidden, rows, b, scales)
