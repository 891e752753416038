"""The specification of gathering and scattering blocks: every layer, keys and values, every bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.kernels.move_blocks import gather_blocks, scatter_blocks

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]
SHAPE = (3, 2, 5, 4, 2, 6)
IDS = [4, 0, 3]


def random_bits(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """NaNs of all kinds among them."""
    generator = torch.Generator().manual_seed(seed)
    size = (*shape[:-1], shape[-1] * dtype.itemsize)
    return torch.randint(256, size, dtype=torch.uint8, generator=generator).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_directions(dtype):
    pool, other = random_bits(*SHAPE, dtype=dtype), random_bits(*SHAPE, dtype=dtype, seed=1)
    before = other.clone()
    staging = random_bits(3, 3, 2, 4, 2, 6, dtype=dtype, seed=2)
    gather_blocks(pool, torch.tensor(IDS), staging)
    scatter_blocks(staging, torch.tensor(IDS), other)
    for layer in range(3):
        for part in range(2):
            for block in range(5):
                source = pool if block in IDS else before
                expected = source[layer, part, block].view(torch.uint8)
                assert torch.equal(other[layer, part, block].view(torch.uint8), expected)
                if block in IDS:
                    staged = staging[IDS.index(block), layer, part].view(torch.uint8)
                    assert torch.equal(staged, expected)


def test_what_does_not_fit_is_our_own_bug():
    pool, staging, ids = torch.zeros(SHAPE), torch.zeros(3, 3, 2, 4, 2, 6), torch.tensor(IDS)
    for wrong in (
        (pool[0], ids, staging),
        (pool, ids[:2], staging),
        (pool, ids.int(), staging),
        (pool, ids, staging.half()),
        (pool.transpose(3, 4), ids, staging.transpose(3, 4)),
    ):
        with pytest.raises(AssertionError):
            gather_blocks(*wrong)
        with pytest.raises(AssertionError):
            scatter_blocks(*reversed(wrong))
