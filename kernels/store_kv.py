"""Writing new keys and values into the paged cache: checks shapes, picks the implementation.

The meaning is specified by `store_kv_reference`, so far the only implementation.
"""

from __future__ import annotations

from torch import Tensor

from penstock.kernels.store_kv_reference import store_kv_reference


def store_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Store this step's keys and values; arguments as in `store_kv_reference`."""
    assert key.shape == value.shape == (len(slot_mapping), *key_cache.shape[2:]), (
        f"key {tuple(key.shape)}, value {tuple(value.shape)}, cache {tuple(key_cache.shape)}"
    )
    assert key_cache.shape == value_cache.shape
    assert key_cache.is_contiguous()
    assert value_cache.is_contiguous()
    store_kv_reference(key, value, key_cache, value_cache, slot_mapping)
