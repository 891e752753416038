"""Attention over a paged KV cache, in Triton: one launch for decodes, one for the rest.

Nothing is read back from the device, and launches depend only on the number of sequences and
tokens and on the layout's host integers: a captured launch stays valid for other lengths up to
`max_seq_len` and `max_query_len`. A captured batch may be padded with sequences of no tokens,
whose rows are not written, or with one token and a `seq_len` of 0, whose rows become zeros.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.gpu.device_limits import device_limits
from penstock.kernels.gpu.paged_decode import decode, decode_config
from penstock.kernels.gpu.paged_prefill import prefill, prefill_config
from penstock.kernels.gpu.tuning import Config, tuned
from penstock.kernels.paged_layout import PagedLayout

_DOT_DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


def paged_attention_triton(
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
    is_contiguous: bool = False,
    config: Config | None = None,
) -> Tensor:
    """Attend as `kernels.paged_attention.paged_attention` says.

    For measurements:

    Args:
        is_contiguous: each sequence's blocks are consecutive, so the table is not read.
        config: used instead of a tuned one, or overrides the heuristics.
    """
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if not layout.num_seqs:
        return output
    arguments = _arguments(
        query, key_cache, value_cache, layout, key_scale, value_scale, is_contiguous
    ) | {
        "scale": scale,
        "soft_cap": soft_cap,
        "window": window,
        "sinks_ptr": sinks,
        "alibi_ptr": alibi,
    }
    shape = (arguments["GROUP"], arguments["HEAD_DIM"])
    limits = device_limits(query.device)
    key = tuning_key(arguments, query.dtype, key_cache.dtype)
    max_query_len = min(layout.max_query_len, len(query))  # it may be larger than what is there
    if max_query_len > 1 or is_invariant:
        tile = prefill_config(*shape, query.dtype, limits)
        tile |= config or tuned("paged_prefill", key) or {}
        prefill(output, arguments, layout, tile, is_invariant=is_invariant)
    if not is_invariant and (max_query_len == 1 or layout.num_seqs > 1):
        dtype = query.dtype if query.dtype == torch.float32 else key_cache.dtype
        tile = decode_config(*shape, dtype, limits)
        tile |= config or tuned("paged_decode", key) or {}
        decode(output, arguments, layout, tile, split_len=split_len)
    return output


def _arguments(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    layout: PagedLayout,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    is_contiguous: bool,
) -> dict[str, Any]:
    """Those of both kernels that follow from the tensors."""
    head_dim = query.shape[2]
    block_size, num_kv_heads = key_cache.shape[1:3]
    if query.stride()[1:] != (head_dim, 1):
        query = query.contiguous()
    scale_stride = 0
    if key_scale is not None and value_scale is not None:
        key_scale, value_scale = key_scale.expand(num_kv_heads), value_scale.expand(num_kv_heads)
        scale_stride = key_scale.stride(0)
        assert value_scale.stride(0) == scale_stride, "scales of keys and values differ in form"
    is_fp8 = key_cache.dtype == torch.float8_e4m3fn
    # Numbers of FP8 are exact in float16, and the conversion is one instruction.
    dot_dtype = torch.float16 if is_fp8 and query.dtype != torch.float32 else query.dtype
    return {
        "query_ptr": query,
        "key_cache_ptr": key_cache,
        "value_cache_ptr": value_cache,
        "query_start_loc_ptr": layout.query_start_loc,
        "seq_lens_ptr": layout.seq_lens,
        "block_tables_ptr": layout.block_tables,
        "key_scale_ptr": key_scale,
        "value_scale_ptr": value_scale,
        "query_stride": query.stride(0),
        "slot_stride": num_kv_heads * head_dim,
        "table_stride": layout.block_tables.stride(0),
        "scale_stride": scale_stride,
        "GROUP": query.shape[1] // num_kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
        "DOT_DTYPE": _DOT_DTYPES[dot_dtype],
        "IS_CONTIGUOUS": is_contiguous,
    }


def tuning_key(arguments: dict[str, Any], dtype: torch.dtype, cache_dtype: torch.dtype) -> str:
    """The class of shapes that shares a configuration; independent of the batch, which therefore
    does not change a token's bits."""
    numbers = (arguments[name] for name in ("HEAD_DIM", "GROUP", "BLOCK_SIZE"))
    table = "contiguous" if arguments["IS_CONTIGUOUS"] else "paged"
    dtypes = (str(each).removeprefix("torch.") for each in (dtype, cache_dtype))
    return " ".join(["head_dim {} group {} block_size {}".format(*numbers), *dtypes, table])
