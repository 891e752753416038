"""The specifications of activations, against `transformers` by its own names of them."""

from __future__ import annotations

import pytest
import torch
from transformers.activations import ACT2FN

from penstock.kernels.activation import Activation, activate, activate_and_mul

ACTIVATIONS: dict[Activation, str] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_pytorch_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_equals_transformers(name, dtype):
    gate_up = torch.randn(5, 2 * 33, generator=torch.Generator().manual_seed(0)).to(dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    function = ACT2FN[ACTIVATIONS[name]]
    assert torch.equal(activate_and_mul(gate_up, name), function(gate) * up)
    assert torch.equal(activate(gate_up, name), function(gate_up))


@pytest.mark.parametrize("shape", [(3, 7), (3, 2, 8)])
def test_what_does_not_fit_is_our_own_bug(shape):
    for name in ACTIVATIONS:
        with pytest.raises(AssertionError):
            activate_and_mul(torch.zeros(shape), name)
