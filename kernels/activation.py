"""Activations of an MLP, with or without a gate: checks shapes, picks the implementation.

The meaning is specified by `kernels.reference.activation`.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from torch import Tensor

from penstock.kernels.gpu_operations import gpu_operation
from penstock.kernels.reference.activation import (
    activate_and_mul_reference,
    activate_reference,
)

# In the order of their numbers in C. `gelu` by erf; `gelu_tanh` is the approximation
# (`transformers` calls it "gelu_pytorch_tanh"); `relu2` is the square of `relu`.
Activation: TypeAlias = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]


def activate_and_mul(gate_up: Tensor, activation: Activation) -> Tensor:
    """gate_up [num_tokens, 2 · size] → [num_tokens, size]; see `activate_and_mul_reference`."""
    assert gate_up.dim() == 2, f"gate and up {tuple(gate_up.shape)}"
    assert gate_up.shape[1] % 2 == 0, f"gate and up of unequal size: {tuple(gate_up.shape)}"
    is_gpu = gate_up.is_cuda
    run = gpu_operation("activate_and_mul", "activation") if is_gpu else activate_and_mul_reference
    gated: Tensor = run(gate_up, activation)
    return gated


def activate(x: Tensor, activation: Activation) -> Tensor:
    """x [num_tokens, size] → the same shape."""
    assert x.dim() == 2, f"rows {tuple(x.shape)}"
    run = gpu_operation("activate", "activation") if x.is_cuda else activate_reference
    active: Tensor = run(x, activation)
    return active
