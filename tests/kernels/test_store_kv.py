"""The specification of storing: slots, padding, FP8."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.kernels.rotary_store_kv import rotary_store_kv
from penstock.kernels.store_kv_reference import store_kv_reference

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


@pytest.mark.parametrize(
    "wrong",
    [
        {"key_cache": nan_cache(torch.float16)},
        {"key_cache": nan_cache(FP8)},
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
