"""LayerNorm against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.gpu.layer_norm import layer_norm_triton

from .tensors import DTYPES, assert_near, normal, poisoned_memory


@settings(max_examples=25, deadline=None)
@given(
    num_rows=st.integers(1, 5),
    size=st.sampled_from([1, 64, 384, 768, 1000, 1024, 4096]),
    dtype=st.sampled_from(DTYPES),
    has_bias=st.booleans(),
    eps=st.sampled_from([1e-5, 1e-12, 0.1]),
    seed=st.integers(0, 99),
)
def test_with_and_without_a_bias(device, num_rows, size, dtype, has_bias, eps, seed):
    check(num_rows, size, dtype, device=device, has_bias=has_bias, eps=eps, seed=seed)


def check(
    num_rows: int,
    size: int,
    dtype: torch.dtype,
    *,
    device: str,
    has_bias: bool = True,
    eps: float = 1e-5,
    seed: int = 0,
) -> None:
    x = normal(num_rows, size, seed=seed, dtype=dtype, device=device)
    weight, bias = (normal(size, seed=seed + n, dtype=dtype, device=device) for n in (1, 2))
    before = x.clone()
    with poisoned_memory():
        normed = layer_norm_triton(x, weight, bias if has_bias else None, eps)
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True)
    exact = centred / (centred.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    assert_near(normed, exact + bias.double() if has_bias else exact)
    assert torch.equal(x, before)


def test_a_mean_far_from_zero_costs_no_digits(device):
    x = normal(3, 1000, seed=0, dtype=torch.float32, device=device) + 1000
    one = torch.ones(1000, device=device)
    wide = x.double()
    exact = (wide - wide.mean(-1, keepdim=True)) / wide.std(-1, keepdim=True, correction=0)
    normed = layer_norm_triton(x, one, None, 0.0)
    torch.testing.assert_close(normed.double(), exact, atol=3e-4, rtol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 64, 8191])
@pytest.mark.parametrize("size", [768, 1000, 12288])
def test_the_sizes_of_real_models(size, num_rows, dtype):
    check(num_rows, size, dtype, device="cuda")
