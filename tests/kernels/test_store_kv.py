"""The specification of storing: slots, padding, FP8."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.kernels import int8_cache
from penstock.kernels.int8_cache import SCALE_BYTES
from penstock.kernels.reference.store_kv import store_kv_reference
from penstock.kernels.rotary_store_kv import rotary_store_kv

FP8 = torch.float8_e4m3fn
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def nan_cache(dtype: torch.dtype) -> Tensor:
    return torch.full((4, 3, 2, 8), torch.nan).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_token_has_its_slot_and_padding_none(dtype):
    key, value = random(4, 2, 8, dtype=dtype), random(4, 2, 8, seed=1, dtype=dtype)
    key[1] = torch.nan  # of padding: stored nowhere
    key_cache, value_cache = nan_cache(dtype), nan_cache(dtype)
    store_kv_reference(key, value, key_cache, value_cache, torch.tensor([7, -1, 0, 11]))
    for cache, new in ((key_cache, key), (value_cache, value)):
        slots = cache.flatten(0, 1)
        assert torch.equal(slots[[7, 0, 11]], new[[0, 2, 3]])
        others = [slot for slot in range(12) if slot not in (7, 0, 11)]
        assert slots[others].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_is_scaled_rounded_and_clamped(dtype):
    """A number is off by a sixteenth of itself at most, or by half of the smallest."""
    key, value = random(3, 2, 8, dtype=dtype), 100 * random(3, 2, 8, seed=1, dtype=dtype)
    key[0, 0, :3] = torch.tensor([1000.0, -1000.0, torch.nan])
    key_scale, value_scale = torch.tensor([0.5, 0.25]), torch.tensor(2.0)
    key_cache, value_cache = nan_cache(FP8), nan_cache(FP8)
    store_kv_reference(
        key,
        value,
        key_cache,
        value_cache,
        torch.tensor([3, 4, 5]),
        key_scale=key_scale,
        value_scale=value_scale,
    )
    for cache, new, scale in ((key_cache, key, key_scale), (value_cache, value, value_scale)):
        scale = scale.expand(2)[:, None]
        stored = cache[1].float() * scale
        clamped = new.float().clamp(-448 * scale, 448 * scale)
        error = (stored - clamped).abs()
        bound = (clamped.abs() / 16).maximum(2**-10 * scale)
        assert (error <= bound)[~new.isnan()].all()
        assert torch.equal(stored.isnan(), new.isnan())
        assert cache[[0, 2, 3]].float().isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_has_a_scale_for_each_token_and_head(dtype):
    """A number is off by half of a scale at most: by 1/254 of the largest of its vector."""
    key, value = random(4, 2, 7, dtype=dtype), 100 * random(4, 2, 7, seed=1, dtype=dtype)
    key[0, 1] = 0.0
    key[1, 0, 2], value[1, 1, 3] = torch.nan, -torch.inf
    caches = tuple(torch.full((4, 3, 2, 7 + SCALE_BYTES), -1, dtype=torch.int8) for _ in "kv")
    slots = torch.tensor([7, 3, -1, 11])
    store_kv_reference(key, value, *caches, slots)
    for cache, new in zip(caches, (key, value), strict=True):
        stored, new = int8_cache.decode(cache.flatten(0, 1)[[7, 3, 11]]), new[[0, 1, 3]].float()
        is_finite = new.isfinite().all(dim=-1)
        assert torch.equal(stored.isfinite().all(dim=-1), is_finite)
        assert int(is_finite.sum()) == 5
        error = (stored - new).abs()
        assert (error <= new.abs().amax(dim=-1, keepdim=True) / 253)[is_finite].all()
        untouched = [slot for slot in range(12) if slot not in (3, 7, 11)]
        assert (cache.flatten(0, 1)[untouched] == -1).all()
    assert torch.equal(int8_cache.decode(caches[0][2, 1, 1]), torch.zeros(7))


@pytest.mark.parametrize(
    "wrong",
    [
        {"key_cache": nan_cache(torch.float16)},
        {"key_cache": nan_cache(FP8)},
        {"key_cache": torch.zeros(4, 3, 2, 12, dtype=torch.int8)},
        {each: torch.zeros(4, 3, 2, 8, dtype=torch.int8) for each in ("key_cache", "value_cache")},
        {"key_scale": torch.ones(2)},
        {"slot_mapping": torch.tensor([0, 1])},
        {"slot_mapping": torch.tensor([0], dtype=torch.int32)},
        {"qkv": random(1, 4, 8)},
    ],
)
def test_what_does_not_fit_is_our_own_bug(wrong):
    arguments = {
        "qkv": random(1, 5, 8),
        "rotary": (random(1, 1, 4), random(1, 1, 4)),
        "key_cache": nan_cache(torch.float32),
        "value_cache": nan_cache(torch.float32),
        "slot_mapping": torch.tensor([0]),
    }
    rotary_store_kv(**arguments)
    with pytest.raises(AssertionError):
        rotary_store_kv(**(arguments | wrong))
