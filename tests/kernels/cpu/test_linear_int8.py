"""Products of int8: the integers of the reference in torch, for each dtype and instruction set.

Quantised rows and sums are compared bit by bit; where a bias or a residual is added, the compiler
may round once less than torch, so those within the dtype's rounding.
"""

from __future__ import annotations

import ctypes

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.kernels.cpu import isa
from penstock.kernels.cpu.int8 import MAX_FEATURES, pack_int8, row_bytes
from penstock.kernels.cpu.library import CpuLibrary, load_library
from penstock.kernels.linear_int8_reference import linear_int8_reference, quantize_rows_reference

ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}
# One library serves all examples of a test; examples do not change it.
SHARED = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def random(*shape: int, seed: int = 0, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def quantized(library: CpuLibrary, x: Tensor) -> tuple[Tensor, Tensor]:
    """The bytes, with 128 for 0, and the scale of each row."""
    values = torch.full((len(x), row_bytes(x.shape[1])), 77, dtype=torch.uint8)
    scales, num_rows = torch.full((len(x),), torch.nan), ctypes.c_int64(len(x))
    library.run(
        "quantize_rows", bytes=values, scales=scales, x=x, num_rows=num_rows, size=x.shape[1]
    )
    return values, scales


def linear_int8(
    library: CpuLibrary,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    packed = pack_int8(library, *quantize_rows_reference(weight))
    values, scales = quantized(library, x)
    y = torch.full((len(x), len(weight)), torch.nan, dtype=x.dtype)
    library.run(
        "linear_int8",
        y=y,
        x=values,
        x_scales=scales,
        weight=packed,
        bias=bias,
        residual=residual,
        num_rows=ctypes.c_int64(len(x)),
        in_features=x.shape[1],
        out_features=len(weight),
    )
    return y


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return linear_int8_reference(x, *quantize_rows_reference(weight), bias)


@SHARED
@given(
    num_rows=st.integers(1, 5),
    size=st.integers(1, 100),
    exponent=st.integers(-7, 4),
    seed=st.integers(0, 99),
)
def test_quantised_rows(library, num_rows, size, exponent, seed):
    x = (random(num_rows, size, seed=seed, dtype=torch.float32) * 10.0**exponent).to(library.dtype)
    rows, row_scales = quantized(library, x)
    values, scales = quantize_rows_reference(x)
    assert torch.equal(rows[:, :size].int() - 128, values.int())
    assert (rows[:, size:] == 128).all()
    assert torch.equal(row_scales, scales)


@SHARED
@given(
    num_rows=st.integers(1, 20),
    size=st.integers(1, 300),
    out=st.integers(1, 150),
    has_bias=st.booleans(),
    has_residual=st.booleans(),
)
def test_linear_int8(library, num_rows, size, out, has_bias, has_residual):
    dtype = library.dtype
    x, weight = random(num_rows, size, dtype=dtype), random(out, size, seed=1, dtype=dtype)
    bias = random(out, seed=2, dtype=dtype) if has_bias else None
    residual = random(num_rows, out, seed=3, dtype=dtype) if has_residual else None
    result = linear_int8(library, x, weight, bias, residual)
    expected = reference(x, weight, bias)
    if residual is not None:
        expected = expected + residual
    if bias is None and residual is None:
        assert torch.equal(result, expected)
    else:
        bound = ROUNDING[dtype] * max(1.0, expected.abs().max().item())
        assert (result.float() - expected.float()).abs().max().item() <= bound


def test_it_is_near_the_product_of_what_was_rounded(library):
    """The error that rounding Gaussian numbers to 255 steps makes: about a hundredth."""
    x, weight = (random(64, 896, seed=seed, dtype=library.dtype) for seed in (0, 1))
    exact = F.linear(x.double(), weight.double())
    error = linear_int8(library, x, weight).double() - exact
    assert 0.005 < error.norm() / exact.norm() < 0.02


def test_sums_at_the_limit_of_32_bits(library):
    """All bytes at their largest, of one sign and of both: no step of the sum saturates."""
    ones = torch.ones(1, MAX_FEATURES, dtype=library.dtype)
    signs = torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0]).to(library.dtype)[:, None]
    halves = torch.ones(1, MAX_FEATURES, dtype=library.dtype)
    halves[:, 1::2] = -1.0
    weight = torch.cat([signs * ones, halves])
    for x in (ones, -ones, halves):
        assert torch.equal(linear_int8(library, x, weight), reference(x, weight))


def test_more_features_are_refused(library):
    with pytest.raises(AssertionError, match="32 bits"):
        pack_int8(library, torch.ones(1, MAX_FEATURES + 1, dtype=torch.int8), torch.ones(1))


def test_a_row_does_not_depend_on_its_neighbours(library):
    dtype = library.dtype
    x, weight = random(37, 97, dtype=dtype), random(200, 97, seed=1, dtype=dtype)
    bias = random(200, seed=2, dtype=dtype)
    together = linear_int8(library, x, weight, bias)
    for size in (1, 2, 3, 8, 9):
        parts = [linear_int8(library, part, weight, bias) for part in x.split(size)]
        assert torch.equal(torch.cat(parts), together)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_so_in_its_row_and_column(library, poison):
    x, weight = (random(6, 40, seed=seed, dtype=library.dtype) for seed in (0, 1))
    clean = linear_int8(library, x, weight)
    x[4, 33], weight[2, 39] = poison, poison
    result = linear_int8(library, x, weight)
    touched = torch.zeros(6, 6, dtype=torch.bool)
    touched[4], touched[:, 2] = True, True
    assert not result[touched].isfinite().any()
    assert torch.equal(result[~touched], clean[~touched])


def test_zeros_and_numbers_too_small_to_scale(library):
    x = torch.zeros(2, 24, dtype=library.dtype)
    x[1] = torch.finfo(torch.float32).tiny  # zero in float16
    weight = random(17, 24, dtype=library.dtype)
    assert torch.equal(linear_int8(library, x, weight), torch.zeros(2, 17, dtype=library.dtype))
    assert torch.equal(linear_int8(library, weight, x), torch.zeros(17, 2, dtype=library.dtype))


def test_a_cpu_with_avx512_and_no_vnni(monkeypatch):
    features = isa._cpu_features() - {"avx512_vnni"}
    monkeypatch.setattr(isa, "_cpu_features", lambda: features)
    library = load_library(torch.float32)
    assert library is not None
    x, weight = (random(9, 71, seed=seed, dtype=torch.float32) for seed in (0, 1))
    assert torch.equal(linear_int8(library, x, weight), reference(x, weight))
