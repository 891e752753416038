"""Gated activations, in plain torch: the specification (Shazeer, "GLU Variants Improve
Transformer", 2020)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_and_mul_reference(gate_up: Tensor) -> Tensor:
    """silu(gate) · up, the activation rounded to the dtype before the product.

    Args:
        gate_up: [num_tokens, 2 · size], gate and up concatenated

    Returns:
        [num_tokens, size]
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_and_mul_reference(gate_up: Tensor, *, approximate: str) -> Tensor:
    """gelu(gate) · up, the activation rounded to the dtype before the product.

    Args:
        gate_up: as in `silu_and_mul_reference`
        approximate: "none" (by erf; `transformers` calls it "gelu") or "tanh" ("gelu_pytorch_tanh")
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate=approximate) * up
