"""Writing new keys and values into the paged cache: checks shapes, picks the implementation.

The meaning is specified by `store_kv_reference`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.gpu_operations import gpu_operation
from penstock.kernels.store_kv_reference import store_kv_reference


def store_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:
    """Store this step's keys and values; arguments as in `store_kv_reference`."""
    assert key.shape == value.shape == (len(slot_mapping), *key_cache.shape[2:]), (
        f"key {tuple(key.shape)}, value {tuple(value.shape)}, cache {tuple(key_cache.shape)}"
    )
    scales = (key_scale, value_scale)
    check_cache(key_cache, value_cache, slot_mapping, dtype=key.dtype, scales=scales)
    store = gpu_operation("store_kv") if key.is_cuda else store_kv_reference
    store(
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        key_scale=key_scale,
        value_scale=value_scale,
    )


def check_cache(
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    dtype: torch.dtype,
    scales: tuple[Tensor | None, Tensor | None],
) -> None:
    """Assert that keys and values of `dtype` can be stored there."""
    assert key_cache.shape == value_cache.shape
    assert key_cache.is_contiguous()
    assert value_cache.is_contiguous()
    assert slot_mapping.dtype == torch.int64, f"slots in {slot_mapping.dtype}"
    num_kv_heads = key_cache.shape[2]
    for cache, scale in zip((key_cache, value_cache), scales, strict=True):
        if scale is None:
            assert cache.dtype == dtype, f"{dtype} into a cache of {cache.dtype} without a scale"
        else:
            assert cache.dtype == torch.float8_e4m3fn, f"a scale for a cache of {cache.dtype}"
            assert scale.dtype == torch.float32, f"a scale in {scale.dtype}"
            assert scale.shape in ((), (num_kv_heads,)), f"scales {tuple(scale.shape)}"
