"""Copies of blocks: every layer, keys and values, reads before writes, every bit."""

from __future__ import annotations

import pytest
import torch

from penstock.kernels.copy_blocks import copy_blocks


def _pool() -> torch.Tensor:
    return torch.arange(2 * 2 * 6 * 3 * 2 * 4, dtype=torch.float32).reshape(2, 2, 6, 3, 2, 4)


def test_copies_keys_and_values_of_every_layer():
    pool, before = _pool(), _pool()
    copy_blocks(pool, [(0, 4), (0, 5), (3, 1)])
    for source, destination in ((0, 4), (0, 5), (3, 1), (0, 0), (2, 2), (3, 3)):
        assert torch.equal(pool[:, :, destination], before[:, :, source])


def test_sources_are_read_before_anything_is_written():
    pool, before = _pool(), _pool()
    copy_blocks(pool, [(0, 1), (1, 0)])
    assert torch.equal(pool[:, :, 0], before[:, :, 1])
    assert torch.equal(pool[:, :, 1], before[:, :, 0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_bits_are_copied_not_numbers(dtype):
    """NaNs of all kinds among them."""
    generator = torch.Generator().manual_seed(0)
    size = (2, 2, 6, 3, 2, 4 * dtype.itemsize)
    bits = torch.randint(256, size, dtype=torch.uint8, generator=generator)
    pool = bits.clone().view(dtype)
    copy_blocks(pool, [(0, 4), (3, 1)])
    assert torch.equal(pool.view(torch.uint8)[:, :, [4, 1]], bits[:, :, [0, 3]])


def test_nothing_to_copy():
    pool = _pool()
    copy_blocks(pool, [])
    assert torch.equal(pool, _pool())


@pytest.mark.parametrize("copies", [[(0, 6)], [(-1, 2)], [(0, 2), (1, 2)]])
def test_impossible_copies_are_our_own_bugs(copies):
    with pytest.raises(AssertionError):
        copy_blocks(_pool(), copies)
