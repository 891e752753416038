"""Attention over a paged KV cache: checks shapes, then picks the implementation.

The meaning is specified by `paged_attention_reference`, so far the only implementation.
"""

from __future__ import annotations

from torch import Tensor

from penstock.kernels.paged_attention_reference import paged_attention_reference
from penstock.kernels.paged_layout import PagedLayout


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    layout: PagedLayout,
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Attend over the cache; arguments and result as in `paged_attention_reference`."""
    _check(query, key_cache, value_cache, layout)
    assert window is None or window >= 1, f"window {window}"
    return paged_attention_reference(
        query, key_cache, value_cache, layout, scale=scale, window=window
    )


def _check(query: Tensor, key_cache: Tensor, value_cache: Tensor, layout: PagedLayout) -> None:
    num_tokens, num_heads, head_dim = query.shape
    _, _, num_kv_heads, cache_head_dim = key_cache.shape
    assert key_cache.shape == value_cache.shape, f"{key_cache.shape} and {value_cache.shape}"
    assert head_dim == cache_head_dim, f"head_dim {head_dim} in query, {cache_head_dim} in cache"
    assert num_heads % num_kv_heads == 0, f"{num_heads} heads share {num_kv_heads} KV heads"
    assert query.dtype == key_cache.dtype == value_cache.dtype, "one dtype for query and cache"
    assert layout.slot_mapping.shape == (num_tokens,), "one slot for each token"
    assert layout.query_start_loc.shape == (layout.num_seqs + 1,)
    assert layout.block_tables.shape[0] == layout.num_seqs
