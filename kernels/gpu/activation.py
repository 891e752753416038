"""Activations of an MLP, with or without a gate: a program computes a part of one token's row."""

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
    elif ACTIVATION == "relu":
        active = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACTIVATION == "relu2":
        active = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        active = active * active
    else:
        active = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    return active


@triton.jit
def activation_kernel(
    active_ptr,  # [num_tokens, size]
    x_ptr,  # [num_tokens, size], or [num_tokens, 2 · size]: gate and up
    SIZE: tl.constexpr,
    ACTIVATION: tl.constexpr,  # one of `kernels.activation`
    IS_GATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = columns < SIZE
    x_ptr += token * (2 * SIZE if IS_GATED else SIZE) + columns
    x = tl.load(x_ptr, is_inside, 0.0)
    active = _activated(x.to(tl.float32), ACTIVATION).to(x.dtype)
    if IS_GATED:  # rounded before the product, as torch does it
        up = tl.load(x_ptr + SIZE, is_inside, 0.0).to(tl.float32)
        active = active.to(tl.float32) * up
    tl.store(active_ptr + token * SIZE + columns, active, is_inside)


def activate_and_mul_triton(gate_up: Tensor, activation: str) -> Tensor:
    return _launch(gate_up, gate_up.shape[1] // 2, activation, is_gated=True)


def activate_triton(x: Tensor, activation: str) -> Tensor:
    return _launch(x, x.shape[1], activation, is_gated=False)


def _launch(x: Tensor, size: int, activation: str, *, is_gated: bool) -> Tensor:
    assert x.is_contiguous()
    active = torch.empty((len(x), size), dtype=x.dtype, device=x.device)
    activation_kernel[(len(x), triton.cdiv(size, _BLOCK))](
        active, x, SIZE=size, ACTIVATION=activation, IS_GATED=is_gated, BLOCK=_BLOCK,
        num_warps=_NUM_WARPS,
    )  # fmt: skip
    return active
