"""Writing new keys and values into the paged cache, in plain torch: the specification."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels import int8_cache
from penstock.kernels.reference.bits import as_bits


def store_kv_reference(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:
    """Store each token's key and value in its slot. A token with slot −1 is padding and is not
    stored. The other slots are distinct.

    Args:
        key, value: [num_tokens, num_kv_heads, head_dim]
        key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_dim], modified; in int8
            with SCALE_BYTES more, as in `int8_cache`
        slot_mapping: int64 [num_tokens], block × block_size + offset, or −1
        key_scale, value_scale: float32 [num_kv_heads] or [], for an FP8 cache, which stores
            x / scale, rounded to nearest and clamped to FP8's range.
    """
    is_stored = slot_mapping >= 0
    slots = slot_mapping[is_stored]
    for new, cache, scale in ((key, key_cache, key_scale), (value, value_cache, value_scale)):
        rows = _as_stored(new[is_stored], scale, cache.dtype)
        as_bits(cache).flatten(0, 1).index_copy_(0, slots, as_bits(rows))


def _as_stored(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x [num_tokens, num_kv_heads, head_dim] as stored in a cache of this dtype, bytes with their
    scales."""
    if dtype == torch.int8:
        return int8_cache.encode(x)
    if scale is None:
        return x
    largest = torch.finfo(dtype).max
    return (x.float() / scale.reshape(-1, 1)).clamp(-largest, largest).to(dtype)
