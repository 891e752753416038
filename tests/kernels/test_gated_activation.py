"""The specifications of gated activations, against `transformers` by its own names of them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from transformers.activations import ACT2FN

from penstock.kernels.gated_activation import gelu_and_mul, silu_and_mul

ACTIVATIONS = {
    "silu": silu_and_mul,
    "gelu": partial(gelu_and_mul, approximate="none"),
    "gelu_pytorch_tanh": partial(gelu_and_mul, approximate="tanh"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_equals_transformers(name, dtype):
    gate_up = torch.randn(5, 2 * 33, generator=torch.Generator().manual_seed(0)).to(dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    assert torch.equal(ACTIVATIONS[name](gate_up), ACT2FN[name](gate) * up)


@pytest.mark.parametrize("shape", [(3, 7), (3, 2, 8)])
def test_what_does_not_fit_is_our_own_bug(shape):
    for run in ACTIVATIONS.values():
        with pytest.raises(AssertionError):
            run(torch.zeros(shape))
