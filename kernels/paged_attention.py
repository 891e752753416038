"""Attention over a paged KV cache: checks shapes, then picks the implementation.

The meaning is specified by `paged_attention_reference`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from penstock.kernels import int8_cache
from penstock.kernels.gpu_operations import gpu_operation
from penstock.kernels.paged_layout import PagedLayout
from penstock.kernels.reference.paged_attention import paged_attention_reference


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    layout: PagedLayout,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    split_len: int | None = None,
    is_invariant: bool = False,
) -> Tensor:
    """Attend over the cache; arguments and result as in `paged_attention_reference`, and

    Args:
        split_len: on a GPU, splits a decode's context into parts of so many positions, whatever
            the batch, so that a row's bits depend only on its own sequence. None: as many parts as
            fill the device.
        is_invariant: on a GPU, a token's bits depend only on its position and the tokens before
            it, not on the batch or its chunk. Nothing is split then.
    """
    _check(query, key_cache, value_cache, layout)
    assert window is None or window >= 1, f"window {window}"
    assert sinks is None or sinks.shape == query.shape[1:2], "one sink for each head"
    assert alibi is None or alibi.shape == query.shape[1:2], "one slope for each head"
    assert alibi is None or soft_cap is None, "no model has both"
    for each in (key_scale, value_scale):
        has_scale, is_fp8 = each is not None, key_cache.dtype == torch.float8_e4m3fn
        assert has_scale == is_fp8, "scales are for a cache in FP8"
    attend: Callable[..., Tensor] = paged_attention_reference
    if query.is_cuda:
        attend = partial(
            gpu_operation("paged_attention"), split_len=split_len, is_invariant=is_invariant
        )
    return attend(
        query,
        key_cache,
        value_cache,
        layout,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
        alibi=alibi,
        key_scale=key_scale,
        value_scale=value_scale,
    )


def _check(query: Tensor, key_cache: Tensor, value_cache: Tensor, layout: PagedLayout) -> None:
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, stored_size = key_cache.shape[2:]
    is_int8 = key_cache.dtype == torch.int8
    expected_size = head_dim + int8_cache.SCALE_BYTES if is_int8 else head_dim
    assert key_cache.shape == value_cache.shape, f"{key_cache.shape} and {value_cache.shape}"
    assert key_cache.is_contiguous()
    assert value_cache.is_contiguous()
    assert key_cache.dtype == value_cache.dtype, "one dtype for keys and values"
    assert stored_size == expected_size, f"head_dim {head_dim} in query, {stored_size} in cache"
    assert not (is_int8 and query.is_cuda), "no GPU kernel reads int8"
    assert num_heads % num_kv_heads == 0, f"{num_heads} heads share {num_kv_heads} KV heads"
    dtypes = (query.dtype, torch.float8_e4m3fn, torch.int8)
    assert key_cache.dtype in dtypes, "the query's dtype, FP8 or int8"
    assert layout.slot_mapping.shape == (num_tokens,), "one slot for each token"
    assert layout.query_start_loc.shape == (layout.num_seqs + 1,)
    assert layout.block_tables.shape[0] == layout.num_seqs
