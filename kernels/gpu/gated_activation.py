"""Gated activations of an MLP: a program computes a part of one token's row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
_NUM_WARPS = 4


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr):
    """x in float32."""
    if ACTIVATION == "silu":
        active = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(u)) / 2 = sigmoid(2u), which does not cancel; 2u = sqrt(8 / π)(x + 0.044715 x³).
        active = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        active = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    return active


@triton.jit
def gated_activation_kernel(
    gated_ptr,  # [num_tokens, size]
    gate_up_ptr,  # [num_tokens, 2 · size]
    SIZE: tl.constexpr,
    ACTIVATION: tl.constexpr,  # "silu", "gelu_tanh" or "gelu_erf"
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = columns < SIZE
    gate_ptr = gate_up_ptr + token * 2 * SIZE + columns
    gate = tl.load(gate_ptr, is_inside, 0.0)
    up = tl.load(gate_ptr + SIZE, is_inside, 0.0).to(tl.float32)
    # Rounded before the product, as torch does it.
    active = _activated(gate.to(tl.float32), ACTIVATION).to(gate.dtype)
    tl.store(gated_ptr + token * SIZE + columns, active.to(tl.float32) * up, is_inside)


def silu_and_mul_triton(gate_up: Tensor) -> Tensor:
    return _launch(gate_up, "silu")


def gelu_and_mul_triton(gate_up: Tensor, *, approximate: str) -> Tensor:
    return _launch(gate_up, {"none": "gelu_erf", "tanh": "gelu_tanh"}[approximate])


def _launch(gate_up: Tensor, activation: str) -> Tensor:
    assert gate_up.is_contiguous()
    num_tokens, size = len(gate_up), gate_up.shape[1] // 2
    gated = torch.empty((num_tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    gated_activation_kernel[(num_tokens, triton.cdiv(size, _BLOCK))](
        gated, gate_up, SIZE=size, ACTIVATION=activation, BLOCK=_BLOCK, num_warps=_NUM_WARPS
    )
    return gated
