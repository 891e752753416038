"""RMSNorm against float64, alone and of a sum."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.kernels.gpu.rms_norm import add_rms_norm_triton, rms_norm_triton

from .tensors import DTYPES, assert_near, normal, poisoned_memory

SIZES = [1, 64, 384, 896, 1000, 1024, 4096, 5120]


def exact_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x, weight = x.double(), weight.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


@settings(max_examples=25, deadline=None)
@given(
    num_rows=st.integers(1, 5),
    size=st.sampled_from(SIZES),
    dtype=st.sampled_from(DTYPES),
    eps=st.sampled_from([1e-6, 1e-5, 0.1]),
    seed=st.integers(0, 99),
)
def test_of_a_sum_and_alone(device, num_rows, size, dtype, eps, seed):
    check(num_rows, size, dtype, eps, seed, device)


def check(num_rows: int, size: int, dtype: torch.dtype, eps: float, seed: int, device: str) -> None:
    x, residual, weight = (
        normal(*shape, seed=seed + n, dtype=dtype, device=device)
        for n, shape in enumerate([(num_rows, size), (num_rows, size), (size,)])
    )
    before = x.clone(), residual.clone()
    with poisoned_memory():
        normed, total = add_rms_norm_triton(x, residual, weight, eps)
        alone = rms_norm_triton(total, weight, eps)
    assert torch.equal(total, x + residual)  # rounded as torch rounds
    assert_near(normed, exact_norm(total, weight, eps))
    assert torch.equal(alone, normed)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_its_neighbours(device, dtype):
    x = normal(4, 896, seed=0, dtype=dtype, device=device)
    weight = normal(896, seed=1, dtype=dtype, device=device)
    together = rms_norm_triton(x, weight, 1e-6)
    assert all(torch.equal(rms_norm_triton(x[[n]], weight, 1e-6)[0], together[n]) for n in range(4))
    x[1, 5] = torch.nan
    broken = rms_norm_triton(x, weight, 1e-6)
    assert broken[1].isnan().all()
    assert torch.equal(broken[[0, 2, 3]], together[[0, 2, 3]])


def test_rows_too_long_are_refused(device):
    x = torch.zeros((1, 1 << 16), device=device)
    with pytest.raises(AssertionError, match="at most"):
        rms_norm_triton(x, x[0], 1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 64, 8191])
@pytest.mark.parametrize("size", [1000, 4096, 8192, 18432])
def test_the_sizes_of_real_models(size, num_rows, dtype):
    check(num_rows, size, dtype, 1e-5, 0, "cuda")
