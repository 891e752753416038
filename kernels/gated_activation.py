"""Gated activations of an MLP: checks shapes, picks the implementation.

The meaning is specified by `gated_activation_reference`.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from penstock.kernels.gated_activation_reference import (
    gelu_and_mul_reference,
    silu_and_mul_reference,
)
from penstock.kernels.gpu_operations import gpu_operation


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """gate_up [num_tokens, 2 · size] → [num_tokens, size]; see `silu_and_mul_reference`."""
    _check(gate_up)
    is_gpu = gate_up.is_cuda
    run = gpu_operation("silu_and_mul", "gated_activation") if is_gpu else silu_and_mul_reference
    gated: Tensor = run(gate_up)
    return gated


def gelu_and_mul(gate_up: Tensor, *, approximate: Literal["none", "tanh"]) -> Tensor:
    """gate_up [num_tokens, 2 · size] → [num_tokens, size]; see `gelu_and_mul_reference`."""
    _check(gate_up)
    is_gpu = gate_up.is_cuda
    run = gpu_operation("gelu_and_mul", "gated_activation") if is_gpu else gelu_and_mul_reference
    gated: Tensor = run(gate_up, approximate=approximate)
    return gated


def _check(gate_up: Tensor) -> None:
    assert gate_up.dim() == 2, f"gate and up {tuple(gate_up.shape)}"
    assert gate_up.shape[1] % 2 == 0, f"gate and up of unequal size: {tuple(gate_up.shape)}"
