"""Copies of blocks against the reference, bit by bit, chains and cycles among them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.gpu.copy_blocks import copy_blocks_triton
from penstock.kernels.reference.copy_blocks import copy_blocks_reference

from .tensors import FP8, random_bits, same_bits

DTYPES = [torch.float32, torch.bfloat16, torch.float16, FP8]
NUM_BLOCKS = 7


def check(shape: tuple[int, ...], copies: list[tuple[int, int]], dtype, device: str) -> None:
    pool, expected = (random_bits(*shape, seed=0, dtype=dtype, device=device) for _ in range(2))
    copy_blocks_triton(pool, copies)
    copy_blocks_reference(expected, copies)
    assert same_bits(pool, expected)


@settings(max_examples=40, deadline=None)
@given(
    num_layers=st.integers(1, 3),
    plane=st.sampled_from([(1, 1, 1), (3, 1, 5), (16, 2, 32)]),
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
@pytest.mark.exhaustive
def test_any_copies(device, num_layers, plane, dtype, data):
    blocks = st.integers(0, NUM_BLOCKS - 1)
    destinations = data.draw(st.lists(blocks, min_size=1, unique=True))
    copies = [(data.draw(blocks), destination) for destination in destinations]
    check((num_layers, 2, NUM_BLOCKS, *plane), copies, dtype, device)


@pytest.mark.parametrize(
    "copies",
    [
        [(0, 1), (1, 2), (2, 3)],
        [(2, 3), (1, 2), (0, 1)],
        [(0, 1), (1, 0)],
        [(0, 1), (1, 2), (2, 0), (0, 3), (4, 5)],
        [(0, 0)],
    ],
)
def test_sources_are_read_before_anything_is_written(device, copies):
    check((2, 2, NUM_BLOCKS, 4, 2, 8), copies, torch.float16, device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sizes_of_real_models(dtype):
    order = torch.randperm(200, generator=torch.Generator().manual_seed(0)).tolist()
    shape = (32, 2, 200, 16, 8, 128)
    check(shape, list(zip(order[:90], order[90:180], strict=True)), dtype, "cuda")
    check(shape, list(zip(order, order[1:] + order[:1], strict=True)), dtype, "cuda")
