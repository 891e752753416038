"""Gathering and scattering blocks against the reference, bit by bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.gpu.move_blocks import gather_blocks_triton, scatter_blocks_triton
from penstock.kernels.reference.move_blocks import (
    gather_blocks_reference,
    scatter_blocks_reference,
)

from .tensors import FP8, random_bits, same_bits

DTYPES = [torch.float32, torch.bfloat16, torch.float16, FP8]


@settings(max_examples=40, deadline=None)
@given(
    num_layers=st.integers(1, 3),
    num_blocks=st.integers(1, 7),
    # block_size, num_kv_heads, head_dim: planes of all alignments, one of more than a program's
    plane=st.sampled_from([(1, 1, 1), (3, 1, 5), (1, 3, 6), (8, 1, 4), (16, 2, 32), (128, 3, 80)]),
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
def test_both_directions(device, num_layers, num_blocks, plane, dtype, data):
    ids = data.draw(st.lists(st.integers(0, num_blocks - 1), min_size=1, unique=True))
    check((num_layers, 2, num_blocks, *plane), ids, dtype, device)


def check(shape: tuple[int, ...], ids: list[int], dtype: torch.dtype, device: str) -> None:
    num_layers, _, _, *plane = shape
    block_ids = torch.tensor(ids, device=device)
    pool = random_bits(*shape, seed=0, dtype=dtype, device=device)
    before = pool.clone()
    staging, expected = (
        random_bits(len(ids), num_layers, 2, *plane, seed=1, dtype=dtype, device=device)
        for _ in range(2)
    )
    gather_blocks_triton(pool, block_ids, staging)
    gather_blocks_reference(pool, block_ids, expected)
    assert same_bits(staging, expected)
    assert same_bits(pool, before)
    other, expected_pool = (
        random_bits(*shape, seed=2, dtype=dtype, device=device) for _ in range(2)
    )
    scatter_blocks_triton(staging, block_ids, other)
    scatter_blocks_reference(staging, block_ids, expected_pool)
    assert same_bits(other, expected_pool)


def test_a_pool_that_begins_at_an_odd_address(device):
    """Such a view can only be moved in narrow words."""
    memory = random_bits(1, 2 * 5 * 6 + 1, seed=0, dtype=torch.uint8, device=device)[0]
    pool = memory[1:].view(1, 2, 5, 1, 1, 6)
    staging = torch.zeros((2, 1, 2, 1, 1, 6), dtype=torch.uint8, device=device)
    gather_blocks_triton(pool, torch.tensor([4, 1], device=device), staging)
    assert torch.equal(staging, pool[:, :, [4, 1]].permute(2, 0, 1, 3, 4, 5))


def test_places_beyond_two_to_the_31(device):
    """The pool's memory is lent, not written, but for the last block."""
    plane = 4099  # odd, so that it is moved byte by byte
    num_blocks = (1 << 31) // plane + 2
    pool = torch.empty((1, 2, num_blocks, 1, 1, plane), dtype=torch.uint8, device=device)
    staging = random_bits(1, 1, 2, 1, 1, plane, seed=0, dtype=torch.uint8, device=device)
    last = torch.tensor([num_blocks - 1], device=device)
    scatter_blocks_triton(staging, last, pool)
    assert torch.equal(pool[:, :, -1], staging[0])
    back = torch.zeros_like(staging)
    gather_blocks_triton(pool, last, back)
    assert torch.equal(back, staging)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [8, 16, 128])
def test_the_sizes_of_real_models(block_size, dtype):
    ids = torch.randperm(200, generator=torch.Generator().manual_seed(0))[:77].tolist()
    check((32, 2, 200, block_size, 8, 128), ids, dtype, "cuda")
