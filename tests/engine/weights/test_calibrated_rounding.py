"""Codes chosen by what a layer reads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.engine.weights.quantization import BLOCK, quantize_rows

from ..quantized_models import relative_error


def _inputs(num_features: int) -> Tensor:
    """[2000, num_features] that depend on each other, some columns far larger than others."""
    generator = torch.Generator().manual_seed(1)
    mixed = torch.randn(2000, num_features, generator=generator)
    mixed = mixed @ torch.randn(num_features, num_features, generator=generator)
    return mixed * torch.logspace(-1, 1, num_features)[torch.randperm(num_features)]


@pytest.mark.parametrize("num_features", [64, 200, 333])
def test_products_change_less_than_by_the_nearest_codes(num_features: int):
    torch.manual_seed(0)
    x, matrix = _inputs(num_features), torch.randn(48, num_features)
    errors = [
        relative_error(x @ quantize_rows(matrix, "int4", x, moments).dequantize().T, x @ matrix.T)
        for moments in (None, x.T @ x)
    ]
    assert errors[1] < 0.75 * errors[0]


def test_inputs_that_are_always_zero_and_fewer_tokens_than_columns():
    x = _inputs(128)[:20]
    x[:, 5:40] = 0
    matrix = torch.randn(16, 128, generator=torch.Generator().manual_seed(2))
    found = quantize_rows(matrix, "int4", x, x.T @ x)
    assert found.columns_per_scale == BLOCK
    assert relative_error(x @ found.dequantize().T, x @ matrix.T) < 0.1


@pytest.mark.parametrize("damage", [torch.nan, torch.inf])
def test_numbers_that_are_none_are_rounded_alone(damage: float):
    """Neither in a matrix nor in what it reads do they spread."""
    matrix, x = torch.randn(8, 64, generator=torch.Generator().manual_seed(3)), _inputs(64)
    matrix[3, 4] = damage
    found = quantize_rows(matrix, "int4", x, x.T @ x).dequantize()
    assert not found[3].isfinite().all()
    assert found[[0, 1, 2, 4, 5, 6, 7]].isfinite().all()
    moments = torch.full((64, 64), damage)
    assert quantize_rows(matrix[:3], "int4", x, moments).dequantize().isfinite().all()
