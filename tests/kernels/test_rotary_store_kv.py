"""The specification of turning and storing: turns are products of complex numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.kernels.qk_norm import QKNorm
from penstock.kernels.rotary_store_kv import rotary_store_kv

TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
HEADS, HEAD_DIM = (4, 2), 6  # of queries and of keys
SLOTS = torch.tensor([5, -1, 0])


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """x [num_tokens, heads, head_dim], angles [num_tokens, 1, head_dim / 2]; in float64."""
    pairs = torch.complex(*x.double().chunk(2, dim=-1))
    product = pairs * torch.polar(torch.ones_like(angles.double()), angles.double())
    return torch.cat((product.real, product.imag), dim=-1)


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_queries_and_keys_are_turned_and_values_are_not(dtype, has_norm):
    num_heads, num_kv_heads = HEADS
    qkv = random(3, num_heads + 2 * num_kv_heads, HEAD_DIM, dtype=dtype)
    angles = random(3, 1, HEAD_DIM // 2, seed=1)
    weights = random(2, HEAD_DIM, seed=2, dtype=dtype)
    caches = torch.full((2, 2, 4, num_kv_heads, HEAD_DIM), torch.nan, dtype=dtype)
    query = rotary_store_kv(
        qkv,
        (angles.cos().to(dtype), angles.sin().to(dtype)),
        *caches.unbind(0),
        SLOTS,
        qk_norm=QKNorm(*weights.unbind(0), 1e-6) if has_norm else None,
    )
    wide = qkv.double()
    if has_norm:
        weight = weights.double().repeat_interleave(torch.tensor(HEADS), dim=0)
        heads = wide[:, : sum(HEADS)]
        scale = (heads.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
        wide = torch.cat((heads * scale * weight, wide[:, sum(HEADS) :]), dim=1)
    expected_query = turned(wide[:, :num_heads], angles)
    expected_key = turned(wide[:, num_heads : sum(HEADS)], angles)
    tolerance = {"atol": 4 * TOLERANCES[dtype], "rtol": TOLERANCES[dtype]}
    torch.testing.assert_close(query.double(), expected_query, **tolerance)
    keys, values = caches.flatten(1, 2)
    torch.testing.assert_close(keys[[5, 0]].double(), expected_key[[0, 2]], **tolerance)
    assert torch.equal(values[[5, 0]], qkv[[0, 2], sum(HEADS) :])
    assert caches.flatten(1, 2)[:, [1, 2, 3, 4, 6, 7]].isnan().all()


@pytest.mark.parametrize(
    "wrong",
    [
        {"qkv": random(3, 4, HEAD_DIM)},  # no query among them
        {"qkv": random(3, 8, HEAD_DIM + 2)},
        {"rotary": (random(3, 1, HEAD_DIM), random(3, 1, HEAD_DIM))},
        {"rotary": (random(3, 1, 3, dtype=torch.float16), random(3, 1, 3))},
        {"slot_mapping": torch.tensor([0, 1])},
    ],
)
def test_what_does_not_fit_is_our_own_bug(wrong):
    cache = torch.zeros(2, 4, HEADS[1], HEAD_DIM)
    arguments = {
        "qkv": random(3, 8, HEAD_DIM),
        "rotary": (random(3, 1, HEAD_DIM // 2), random(3, 1, HEAD_DIM // 2)),
        "key_cache": cache,
        "value_cache": cache.clone(),
        "slot_mapping": SLOTS,
    }
    rotary_store_kv(**arguments)
    with pytest.raises(AssertionError):
        rotary_store_kv(**(arguments | wrong))
