"""Activations against float64; one with a gate is rounded before the product."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.kernels.gpu.activation import activate_and_mul_triton, activate_triton

from .tensors import DTYPES, assert_near, normal, poisoned_memory

ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


@pytest.fixture(autouse=True, scope="module")
def _overflow_is_meant() -> Iterator[None]:
    """exp(100) is infinite, and 1 / (1 + exp(100)) as it should be; the interpreter is numpy."""
    with np.errstate(over="ignore"):
        yield


@pytest.mark.parametrize("name", ACTIVATIONS)
@settings(max_examples=12, deadline=None)
@given(
    num_tokens=st.integers(1, 4),
    size=st.sampled_from([1, 96, 1000, 1024, 1025, 4864]),
    dtype=st.sampled_from(DTYPES),
    spread=st.sampled_from([1.0, 10.0, 100.0]),
    seed=st.integers(0, 99),
)
def test_each_activation(device, name, num_tokens, size, dtype, spread, seed):
    gate_up = normal(num_tokens, 2 * size, seed=seed, dtype=dtype, device=device)
    gate_up[:, :size] *= min(spread, 10.0) if name == "relu2" else spread  # float16's range
    check(name, gate_up)


def check(name: str, gate_up: Tensor) -> None:
    activation, before = ACTIVATIONS[name], gate_up.clone()
    with poisoned_memory():
        gated, active = activate_and_mul_triton(gate_up, name), activate_triton(gate_up, name)
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_near(gated, activation(gate) * up, terms=gate * up)
    assert_near(active, activation(gate_up.double()), terms=gate_up)
    assert torch.equal(gate_up, before)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_activation_is_rounded_before_the_product(device, name):
    """Then nearly all numbers are those of torch to the bit."""
    activation = ACTIVATIONS[name]
    gate_up = normal(4, 2000, seed=0, dtype=torch.float16, device=device)
    gate, up = gate_up.chunk(2, dim=-1)
    assert (activate_and_mul_triton(gate_up, name) == activation(gate) * up).float().mean() > 0.98


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_ends_of_the_range(device, name):
    """There all are relu, or its square: neither exp nor a cube overflows into NaN."""
    gate = torch.tensor([[0.0, -0.0, 60000, -60000, 3e38, -3e38, torch.inf]], device=device)
    gated = activate_and_mul_triton(torch.cat((gate, torch.ones_like(gate)), dim=1), name)
    assert torch.equal(gated, gate.relu().square() if name == "relu2" else gate.relu())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 64, 4097])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_sizes_of_real_models(name, num_tokens, dtype):
    check(name, normal(num_tokens, 2 * 14336, seed=0, dtype=dtype, device="cuda"))
