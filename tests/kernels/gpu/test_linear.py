"""The matrix product against float64, and that a row's bits depend on nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.gpu.linear import config_for, linear_triton

from .tensors import DTYPES, normal, poisoned_memory


def check(
    num_rows: int, in_features: int, out_features: int, dtype: torch.dtype, device: str, seed: int
) -> None:
    x = normal(num_rows, in_features, seed=seed, dtype=dtype, device=device)
    weight = normal(out_features, in_features, seed=seed + 1, dtype=dtype, device=device)
    bias = normal(out_features, seed=seed + 2, dtype=dtype, device=device) if seed % 2 else None
    with poisoned_memory():
        output = linear_triton(x, weight, bias)
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert output.shape == exact.shape
    error = (output.double() - exact).abs().max()
    assert error <= 2 * torch.finfo(dtype).eps * exact.abs().max() + 1e-5 * in_features**0.5


@settings(max_examples=15, deadline=None)
@given(
    num_rows=st.integers(0, 70),
    in_features=st.sampled_from([1, 48, 64, 100, 130]),
    out_features=st.sampled_from([1, 33, 64, 96]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_equals_its_definition(device, num_rows, in_features, out_features, dtype, seed):
    if num_rows:
        check(num_rows, in_features, out_features, dtype, device, seed)
    else:
        x = torch.zeros(0, in_features, dtype=dtype, device=device)
        weight = torch.zeros(out_features, in_features, dtype=dtype, device=device)
        assert linear_triton(x, weight).shape == (0, out_features)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_its_batch(device, dtype):
    num_rows = 2 * config_for(dtype)["BLOCK_M"] + 3
    x = normal(num_rows, 200, seed=0, dtype=dtype, device=device)
    weight = normal(72, 200, seed=1, dtype=dtype, device=device)
    together = linear_triton(x, weight)
    for count in (1, 2, 17, num_rows - 1):
        assert torch.equal(linear_triton(x[-count:], weight), together[-count:])
    x[3] = torch.nan
    broken = linear_triton(x, weight)
    assert broken[3].isnan().all()
    others = torch.arange(num_rows, device=device) != 3
    assert torch.equal(broken[others], together[others])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 31, 64, 257, 2048])
def test_the_sizes_of_real_models(num_rows, dtype):
    check(num_rows, 4096, 6144, dtype, "cuda", 0)
    x = normal(num_rows, 4096, seed=3, dtype=dtype, device="cuda")
    weight = normal(1024, 4096, seed=4, dtype=dtype, device="cuda")
    assert torch.equal(linear_triton(x[-1:], weight), linear_triton(x, weight)[-1:])
