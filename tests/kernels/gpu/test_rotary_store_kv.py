"""Turning and storing in one launch against the reference: the same queries and caches.

Rounded as the reference rounds, results in 16 bits are the same to the bit; in float32 a GPU may
fuse a product with a sum. A norm adds up in another order, which a rounding may show.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.kernels.gpu.rotary_store_kv import rotary_store_kv_triton
from penstock.kernels.qk_norm import QKNorm
from penstock.kernels.reference.rotary_store_kv import rotary_store_kv_reference

from .kv_cases import HEAD_DIMS, empty_cache, exact_in_fp8, fp8_scales, same_numbers, slot_lists
from .tensors import DTYPES, FP8, normal, poisoned_memory

HEADS = [(1, 1), (2, 1), (3, 3), (6, 2), (7, 1), (15, 5), (32, 2)]


def angles(
    num_tokens: int, head_dim: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor]:
    turn = normal(num_tokens, 1, head_dim // 2, seed=9, dtype=torch.float32, device=device)
    return turn.cos().to(dtype), turn.sin().to(dtype)


def run_both(
    qkv: Tensor,
    rotary: tuple[Tensor, Tensor],
    num_kv_heads: int,
    slots: list[int],
    *,
    block_size: int = 8,
    qk_norm: QKNorm | None = None,
    scales: tuple[Tensor | None, Tensor | None] = (None, None),
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Queries, keys and values of the kernel and of the reference; everything else unchanged."""
    results = []
    before = qkv.clone()
    for run in (rotary_store_kv_triton, rotary_store_kv_reference):
        dtype = qkv.dtype if scales[0] is None else FP8
        keys, values = (
            empty_cache(
                slots, block_size, (num_kv_heads, qkv.shape[2]), dtype=dtype, device=qkv.device
            )
            for _ in range(2)
        )
        with poisoned_memory():
            query = run(
                qkv,
                rotary,
                keys,
                values,
                torch.tensor(slots, device=qkv.device),
                qk_norm=qk_norm,
                key_scale=scales[0],
                value_scale=scales[1],
            )
        results.append((query, keys, values))
    assert torch.equal(qkv, before)
    return results


def assert_same(found: Tensor, expected: Tensor, *, is_exact: bool) -> None:
    """Untouched places (NaN) included; if not exact, to a few roundings."""
    bound = 0.0 if is_exact else 8 * torch.finfo(found.dtype).eps
    torch.testing.assert_close(found, expected, rtol=bound, atol=bound, equal_nan=True)


def check(
    slots: list[int],
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    *,
    has_norm: bool,
    device: str,
    block_size: int = 16,
) -> None:
    num_all = heads[0] + 2 * heads[1]
    qkv = normal(len(slots), num_all, head_dim, seed=0, dtype=dtype, device=device)
    query_weight, key_weight = (
        normal(head_dim, seed=n, dtype=dtype, device=device) for n in (1, 2)
    )
    (query, keys, values), expected = run_both(
        qkv,
        angles(len(slots), head_dim, dtype, device),
        heads[1],
        slots,
        block_size=block_size,
        qk_norm=QKNorm(query_weight, key_weight, 1e-6) if has_norm else None,
    )
    is_exact = dtype != torch.float32 and not has_norm
    assert not query.isnan().any()
    assert_same(query, expected[0], is_exact=is_exact)
    assert_same(keys, expected[1], is_exact=is_exact)
    assert same_numbers(values, expected[2])


@pytest.mark.exhaustive
@settings(max_examples=60, deadline=None)
@given(
    slots=slot_lists(),
    block_size=st.sampled_from([1, 3, 8, 16]),
    heads=st.sampled_from(HEADS),
    head_dim=st.sampled_from([2, 6, *HEAD_DIMS]),
    dtype=st.sampled_from(DTYPES),
    has_norm=st.booleans(),
)
def test_any_step(device, slots, block_size, heads, head_dim, dtype, has_norm):
    check(slots, heads, head_dim, dtype, has_norm=has_norm, device=device, block_size=block_size)


def test_what_a_norm_gives_is_rounded_before_it_is_turned(device):
    """Then nearly all numbers are the same to the bit."""
    weights = normal(2, 128, seed=1, dtype=torch.float16, device=device).unbind(0)
    qkv = normal(3, 24, 128, seed=0, dtype=torch.float16, device=device)
    rotary = angles(3, 128, torch.float16, device)
    found, expected = run_both(qkv, rotary, 4, [0, 1, 2], qk_norm=QKNorm(*weights, 1e-6))
    assert (found[0] == expected[0]).float().mean() > 0.99


@settings(max_examples=30, deadline=None)
@given(
    slots=slot_lists(),
    num_kv_heads=st.sampled_from([1, 3, 8]),
    head_dim=st.sampled_from(HEAD_DIMS),
    dtype=st.sampled_from(DTYPES),
    has_one_scale=st.booleans(),
)
def test_fp8(device, slots, num_kv_heads, head_dim, dtype, has_one_scale):
    """Keys are turned by no angle, since the interpreter cannot round what a turn gives."""
    num_tokens = len(slots)
    key_scale, value_scale = fp8_scales(num_kv_heads, has_one_scale, device)
    one = torch.ones(num_kv_heads, device=device)
    scales = torch.cat((one, one * key_scale, one * value_scale))[:, None]
    shape = (num_tokens, 3 * num_kv_heads, head_dim)
    qkv = exact_in_fp8(*shape, seed=0, dtype=torch.float32, device=device) * scales
    cos = torch.ones((num_tokens, 1, head_dim // 2), dtype=dtype, device=device)
    (query, keys, values), expected = run_both(
        qkv.to(dtype),
        (cos, torch.zeros_like(cos)),
        num_kv_heads,
        slots,
        scales=(key_scale, value_scale),
    )
    assert torch.equal(query, expected[0])
    assert same_numbers(keys, expected[1])
    assert same_numbers(values, expected[2])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 33, 4099])
def test_the_sizes_of_real_models(num_tokens, has_norm, dtype):
    order = torch.randperm(num_tokens, generator=torch.Generator().manual_seed(0)).tolist()
    slots = [-1 if n % 5 == 3 else slot for n, slot in enumerate(order)]
    check(slots, (32, 8), 128, dtype, has_norm=has_norm, device="cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fp8_rounds_as_the_reference(dtype):
    qkv = normal(257, 48, 128, seed=0, dtype=dtype, device="cuda")
    qkv *= torch.logspace(-3, 3, 128, device="cuda").to(dtype)
    scale = torch.rand(8, generator=torch.Generator().manual_seed(3)).cuda() + 0.01
    slots = torch.randperm(257, generator=torch.Generator().manual_seed(1)).tolist()
    rotary = angles(257, 128, dtype, "cuda")
    (_, keys, values), expected = run_both(qkv, rotary, 8, slots, scales=(scale, 1 / scale))
    assert same_numbers(keys, expected[1])
    assert same_numbers(values, expected[2])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_slots_beyond_two_to_the_31_numbers():
    qkv = normal(1, 24, 128, seed=0, dtype=torch.bfloat16, device="cuda")
    cos = torch.ones((1, 1, 64), dtype=qkv.dtype, device="cuda")
    num_blocks = (1 << 31) // (16 * 8 * 128) + 1
    caches = [torch.zeros((num_blocks, 16, 8, 128), dtype=qkv.dtype, device="cuda") for _ in "kv"]
    slots = torch.tensor([num_blocks * 16 - 1], device="cuda")
    rotary_store_kv_triton(qkv, (cos, torch.zeros_like(cos)), *caches, slots)
    assert torch.equal(caches[0][-1, -1], qkv[0, 8:16])
    assert torch.equal(caches[1][-1, -1], qkv[0, 16:])
