"""The specifications of RMSNorm and LayerNorm, against their formulas in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.kernels.layer_norm import layer_norm
from penstock.kernels.rms_norm import add_rms_norm, rms_norm

TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(result: Tensor, exact: Tensor) -> None:
    tolerance = TOLERANCES[result.dtype]
    torch.testing.assert_close(result.double(), exact, atol=4 * tolerance, rtol=tolerance)


@pytest.mark.parametrize("eps", [1e-6, 0.1])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_rms_norm_alone_and_of_a_sum(dtype, eps):
    x, residual = random(5, 33, dtype=dtype), random(5, 33, seed=1, dtype=dtype)
    weight = random(33, seed=2, dtype=dtype)
    before = x.clone(), residual.clone()
    normed, total = add_rms_norm(x, residual, weight, eps)
    assert torch.equal(total, x + residual)
    wide = total.double()
    exact = wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    assert_near(normed, exact)
    assert torch.equal(rms_norm(total, weight, eps), normed)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_layer_norm(dtype, has_bias):
    x, (weight, bias) = random(5, 33, dtype=dtype), random(2, 33, seed=1, dtype=dtype)
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True)
    exact = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    if has_bias:
        exact = exact + bias.double()
    assert_near(layer_norm(x, weight, bias if has_bias else None, 1e-5), exact)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_rms_norm_with_weights_that_are_offsets(dtype):
    x, residual = random(5, 33, dtype=dtype), random(5, 33, seed=1, dtype=dtype)
    weight = 0.1 * random(33, seed=2, dtype=dtype)
    normed, total = add_rms_norm(x, residual, weight, 1e-6, 1.0)
    wide = total.double()
    exact = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * (weight.double() + 1)
    assert_near(normed, exact)
    assert torch.equal(rms_norm(total, weight, 1e-6, 1.0), normed)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_layer_norm_of_each_group(dtype):
    x, (weight, bias) = random(5, 36, dtype=dtype), random(2, 36, seed=1, dtype=dtype)
    found = layer_norm(x, weight, bias, 1e-5, 3)
    for columns in torch.arange(36).split(12):
        alone = layer_norm(x[:, columns], weight[columns], bias[columns], 1e-5)
        assert_near(found[:, columns], alone.double())


def test_what_does_not_fit_is_our_own_bug():
    x, weight = random(2, 8), random(8)
    for run in (
        lambda: rms_norm(x[0], weight, 1e-6),
        lambda: rms_norm(x, weight[:4], 1e-6),
        lambda: add_rms_norm(x, x[:1], weight, 1e-6),
        lambda: add_rms_norm(x, x.half(), weight, 1e-6),
        lambda: layer_norm(x, weight, weight[:4], 1e-6),
    ):
        with pytest.raises(AssertionError):
            run()
