"""Storing keys and values against the reference: the same caches, bit by bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.kernels.gpu.store_kv import store_kv_triton
from penstock.kernels.store_kv_reference import store_kv_reference

from .kv_cases import HEAD_DIMS, empty_cache, exact_in_fp8, same_numbers, slot_lists
from .tensors import DTYPES, FP8, normal


def check(
    key: Tensor,
    value: Tensor,
    slots: list[int],
    block_size: int,
    scales: tuple[Tensor | None, Tensor | None] = (None, None),
) -> None:
    dtype = key.dtype if scales[0] is None else FP8
    caches = [
        empty_cache(slots, block_size, key.shape[1:], dtype=dtype, device=key.device)
        for _ in range(4)
    ]
    slot_mapping = torch.tensor(slots, device=key.device)
    for store, (keys, values) in (
        (store_kv_triton, caches[:2]),
        (store_kv_reference, caches[2:]),
    ):
        store(key, value, keys, values, slot_mapping, key_scale=scales[0], value_scale=scales[1])
    assert same_numbers(caches[0], caches[2])
    assert same_numbers(caches[1], caches[3])


@settings(max_examples=60, deadline=None)
@given(
    slots=slot_lists(),
    block_size=st.sampled_from([1, 3, 8, 16]),
    num_kv_heads=st.sampled_from([1, 2, 3, 8]),
    head_dim=st.sampled_from([5, *HEAD_DIMS]),
    dtype=st.sampled_from(DTYPES),
    is_fused=st.booleans(),  # key and value are parts of one tensor, as a projection gives them
)
def test_any_step(device, slots, block_size, num_kv_heads, head_dim, dtype, is_fused):
    shape = (len(slots), 2 * num_kv_heads, head_dim)
    both = normal(*shape, seed=0, dtype=dtype, device=device)
    key, value = both.split(num_kv_heads, dim=1)
    if not is_fused:
        key, value = key.contiguous(), value.contiguous()
    check(key, value, slots, block_size)


@settings(max_examples=30, deadline=None)
@given(
    slots=slot_lists(),
    num_kv_heads=st.sampled_from([1, 3, 8]),
    head_dim=st.sampled_from(HEAD_DIMS),
    dtype=st.sampled_from(DTYPES),
    has_one_scale=st.booleans(),
)
def test_fp8(device, slots, num_kv_heads, head_dim, dtype, has_one_scale):
    scales = fp8_scales(num_kv_heads, has_one_scale, device)
    shape = (len(slots), num_kv_heads, head_dim)
    key, value = (
        (exact_in_fp8(*shape, seed=n, dtype=torch.float32, device=device) * scale.view(-1, 1))
        for n, scale in enumerate(scales)
    )
    check(key.to(dtype), value.to(dtype), slots, 8, scales)


def fp8_scales(num_kv_heads: int, has_one_scale: bool, device: str) -> tuple[Tensor, Tensor]:
    """Powers of two, by which numbers scale exactly."""
    powers = torch.arange(num_kv_heads, device=device) % 3 - 1
    scales = torch.exp2(powers), torch.exp2(-powers)
    return (scales[0][0], scales[1][0]) if has_one_scale else scales


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_fp8", [False, True])
def test_the_sizes_of_real_models(dtype, is_fp8):
    """Numbers of all sizes: FP8 rounds, clamps, and keeps NaN."""
    num_tokens, heads = 4099, (8, 128)
    slots = torch.randperm(num_tokens, generator=torch.Generator().manual_seed(0)).tolist()
    slots[5:50] = [-1] * 45
    key, value = (normal(num_tokens, *heads, seed=n, dtype=dtype, device="cuda") for n in (1, 2))
    key *= torch.logspace(-4, 4, 128, device="cuda").to(dtype)
    key[7, 0, 3] = key[60, 1, 2] = torch.nan
    scale = torch.rand(8, generator=torch.Generator().manual_seed(3)).cuda() + 0.01
    check(key, value, slots, 16, (scale, 1 / scale) if is_fp8 else (None, None))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_slots_beyond_two_to_the_31_numbers():
    key = normal(1, 8, 128, seed=0, dtype=torch.bfloat16, device="cuda")
    num_blocks = (1 << 31) // (16 * 8 * 128) + 1
    caches = [torch.zeros((num_blocks, 16, 8, 128), dtype=key.dtype, device="cuda") for _ in "kv"]
    store_kv_triton(key, -key, *caches, torch.tensor([num_blocks * 16 - 1], device="cuda"))
    assert torch.equal(caches[0][-1, -1], key[0])
    assert torch.equal(caches[1][-1, -1], -key[0])
