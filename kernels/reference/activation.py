"""Activations, in plain torch: the specification (gated ones: Shazeer, "GLU Variants Improve
Transformer", 2020; squared ReLU: So et al., "Primer: Searching for Efficient Transformers for
Language Modeling", 2021)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def activate_and_mul_reference(gate_up: Tensor, activation: str) -> Tensor:
    """activation(gate) · up, the activation rounded to the dtype before the product.

    Args:
        gate_up: [num_tokens, 2 · size], gate and up concatenated

    Returns:
        [num_tokens, size]
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return activate_reference(gate, activation) * up


def activate_reference(x: Tensor, activation: str) -> Tensor:
    """x [num_tokens, size] → the same shape, rounded once."""
    return _FUNCTIONS[activation](x)
