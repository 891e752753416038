"""Writing new keys and values into the paged cache, in plain torch: the specification."""

from __future__ import annotations

from torch import Tensor


def store_kv_reference(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Store each token's key and value in its slot; slots are distinct.

    Args:
        key, value: [num_tokens, num_kv_heads, head_dim]
        key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_dim], changed
        slot_mapping: int64 [num_tokens], block × block_size + offset
    """
    key_cache.flatten(0, 1).index_copy_(0, slot_mapping, key)
    value_cache.flatten(0, 1).index_copy_(0, slot_mapping, value)
