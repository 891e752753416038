"""The kernels called one by one, on tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure
from typing import get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.activation import Activation
from penstock.kernels.cpu.library import CpuLibrary, pair_of, unpack_keys, unpack_values
from penstock.kernels.cpu.lora import CHUNK, pack_pair, set_pair, table_of_pairs
from penstock.kernels.cpu.quantized import PackedCodes
from penstock.kernels.int8_cache import SCALE_BYTES
from penstock.kernels.paged_layout import PagedLayout
from penstock.kernels.reference.linear_quantized import MAX_OUTLIER_BLOCK
from penstock.kernels.reference.lora import LoraRows


def step_of(library: CpuLibrary, layout: PagedLayout, num_tokens: int) -> Structure:
    return library.structure(
        "step",
        num_tokens=num_tokens,
        num_seqs=layout.num_seqs,
        table_stride=layout.block_tables.stride(0),
        slot_mapping=layout.slot_mapping,
        query_start_loc=layout.query_start_loc,
        seq_lens=layout.seq_lens,
        block_tables=layout.block_tables,
    )


def linear(
    library: CpuLibrary,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    packed = library.pack(weight)
    y = torch.full((len(x), len(weight)), torch.nan, dtype=x.dtype)
    rows = ctypes.c_int64(len(x))
    library.run(
        "linear",
        y=y,
        x=x,
        weight=packed,
        bias=bias,
        residual=residual,
        num_rows=rows,
        in_features=x.shape[1],
        out_features=len(weight),
    )
    return y


def pack_cache(key_cache: Tensor, value_cache: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Caches [num_blocks, block_size, num_kv_heads, head_dim] in the order of attention.inc.c, for
    a library of this dtype."""
    pair = pair_of(dtype)
    if key_cache.dtype != torch.int8:
        return _pack_keys(key_cache, pair), _pack_values(value_cache, pair)
    (keys, key_scales), (values, value_scales) = map(_split, (key_cache, value_cache))
    return (
        _join(_pack_keys(keys, pair), key_scales),
        _join(_pack_values(values, pair), value_scales),
    )


def unpack_cache(keys: Tensor, values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The inverse of `pack_cache`."""
    pair = pair_of(dtype)
    if keys.dtype != torch.int8:
        return unpack_keys(keys, pair), unpack_values(values, pair)
    (keys, key_scales), (values, value_scales) = map(_take_apart, (keys, values))
    return (
        torch.cat([unpack_keys(keys, pair), key_scales], dim=-1),
        torch.cat([unpack_values(values, pair), value_scales], dim=-1),
    )


def _pack_keys(cache: Tensor, pair: int) -> Tensor:
    num_blocks, block_size, num_kv_heads, head_dim = cache.shape
    pairs = cache.view(num_blocks, block_size, num_kv_heads, head_dim // pair, pair)
    return pairs.permute(0, 2, 3, 1, 4).contiguous().view_as(cache)


def _pack_values(cache: Tensor, pair: int) -> Tensor:
    num_blocks, block_size, num_kv_heads, head_dim = cache.shape
    pairs = cache.view(num_blocks, block_size // pair, pair, num_kv_heads, head_dim)
    return pairs.permute(0, 3, 1, 4, 2).contiguous().view_as(cache)


def _split(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of a cache in int8, position by position."""
    codes, scales = cache.split([cache.shape[-1] - SCALE_BYTES, SCALE_BYTES], dim=-1)
    return codes.contiguous(), scales


def _join(codes: Tensor, scales: Tensor) -> Tensor:
    """In each head's part of a block the codes, as they are packed, then the scales."""
    num_blocks, block_size, num_kv_heads, head_dim = codes.shape
    parts = (codes.view(num_blocks, num_kv_heads, -1), scales.transpose(1, 2).flatten(2))
    shape = (num_blocks, block_size, num_kv_heads, head_dim + SCALE_BYTES)
    return torch.cat(parts, dim=-1).view(shape)


def _take_apart(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `_join`."""
    num_blocks, block_size, num_kv_heads, stored_size = packed.shape
    sizes = [block_size * (stored_size - SCALE_BYTES), block_size * SCALE_BYTES]
    codes, scales = packed.view(num_blocks, num_kv_heads, -1).split(sizes, dim=-1)
    codes = codes.reshape(num_blocks, block_size, num_kv_heads, -1)
    scales = scales.view(num_blocks, num_kv_heads, block_size, SCALE_BYTES)
    return codes, scales.transpose(1, 2)


def attention(
    library: CpuLibrary,
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
) -> Tensor:
    out = torch.full_like(query, torch.nan)
    keys, values = pack_cache(key_cache, value_cache, query.dtype)
    step = step_of(library, layout, len(query))
    library.run(
        "attention",
        out=out,
        query=query,
        key_cache=keys,
        value_cache=values,
        key_scales=key_scale,
        value_scales=value_scale,
        step=step,
        block_size=key_cache.shape[1],
        num_heads=query.shape[1],
        num_kv_heads=key_cache.shape[2],
        head_dim=query.shape[2],
        is_int8=key_cache.dtype == torch.int8,
        window=window or 0,
        scale=scale,
        soft_cap=soft_cap or 0.0,
        sinks=sinks,
        alibi=alibi,
    )
    return out


def rms_norm(
    library: CpuLibrary,
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    offset: float = 0.0,
    stride: int = 0,
) -> Tensor:
    y = torch.full_like(x, torch.nan)
    rows = ctypes.c_int64(len(x))
    library.run(
        "rms_norm",
        y=y,
        x=x,
        weight=weight,
        num_rows=rows,
        size=len(weight),
        stride=stride,
        eps=eps,
        offset=offset,
    )
    return y


def layer_norm(
    library: CpuLibrary,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    num_groups: int = 1,
    stride: int = 0,
) -> Tensor:
    y = torch.full_like(x, torch.nan)
    rows = ctypes.c_int64(len(x))
    library.run(
        "layer_norm",
        y=y,
        x=x,
        weight=weight,
        bias=bias,
        num_rows=rows,
        size=len(weight) // num_groups,
        num_groups=num_groups,
        stride=stride,
        eps=eps,
    )
    return y


def silu_mul(library: CpuLibrary, x: Tensor) -> Tensor:
    y = torch.full((len(x), x.shape[1] // 2), torch.nan, dtype=x.dtype)
    rows = ctypes.c_int64(len(x))
    library.run("silu_mul", y=y, x=x, num_rows=rows, size=x.shape[1] // 2)
    return y


def activate(library: CpuLibrary, x: Tensor, activation: Activation, *, is_gated: bool) -> Tensor:
    size = x.shape[1] // 2 if is_gated else x.shape[1]
    y = torch.full((len(x), size), torch.nan, dtype=x.dtype)
    rows, kind = ctypes.c_int64(len(x)), get_args(Activation).index(activation)
    library.run("activate", y=y, x=x, num_rows=rows, size=size, kind=kind, is_gated=is_gated)
    return y


def scale_add(library: CpuLibrary, x: Tensor, residual: Tensor | None, factor: float) -> Tensor:
    y = torch.full_like(x, torch.nan)
    rows, size = ctypes.c_int64(len(x)), x.shape[1]
    library.run("scale_add", y=y, x=x, residual=residual, num_rows=rows, size=size, factor=factor)
    return y


def clamp(library: CpuLibrary, x: Tensor, limit: float) -> Tensor:
    """Between columns that it leaves as they are."""
    x, size = F.pad(x, (1, 1)), x.shape[1]
    y = torch.full_like(x, torch.nan)
    library.run(
        "clamp", y=y[:, 1:], x=x[:, 1:], num_rows=ctypes.c_int64(len(x)), size=size,
        stride=size + 2, limit=limit,
    )  # fmt: skip
    assert y[:, [0, -1]].isnan().all()
    return y[:, 1:-1]


def add_positions(library: CpuLibrary, x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    y = torch.full_like(x, torch.nan)
    step = library.structure("step", num_tokens=len(x), rotary_rows=positions)
    library.run("add_positions", y=y, x=x, table=table, step=step, size=x.shape[1])
    return y


def cap_logits(library: CpuLibrary, x: Tensor, factor: float, soft_cap: float) -> Tensor:
    y = torch.full_like(x, torch.nan)
    rows, size = ctypes.c_int64(len(x)), x.shape[1]
    library.run("cap_logits", y=y, x=x, num_rows=rows, size=size, factor=factor, soft_cap=soft_cap)
    return y


def embed(library: CpuLibrary, token_ids: Tensor, weight: Tensor, *, is_packed: bool) -> Tensor:
    held = library.pack(weight) if is_packed else weight
    y = torch.full((len(token_ids), weight.shape[1]), torch.nan, dtype=weight.dtype)
    step = library.structure("step", num_tokens=len(token_ids), token_ids=token_ids)
    library.run(
        "embed",
        y=y,
        weight=held,
        step=step,
        size=weight.shape[1],
        vocab_size=len(weight),
        is_packed=is_packed,
    )
    return y


def gather_rows(library: CpuLibrary, x: Tensor, rows: Tensor) -> Tensor:
    y = torch.full((len(rows), x.shape[1]), torch.nan, dtype=x.dtype)
    step = library.structure("step", num_sampled=len(rows), sampled_tokens=rows)
    library.run("gather_rows", y=y, x=x, step=step, size=x.shape[1])
    return y


def place_features(library: CpuLibrary, x: Tensor, rows: Tensor, features: Tensor) -> Tensor:
    y = x.clone()
    step = library.structure("step", num_features=len(rows), feature_rows=rows, features=features)
    library.run("place_features", y=y, step=step, size=x.shape[1])
    return y


def rope_store(
    library: CpuLibrary,
    qkv: Tensor,
    caches: tuple[Tensor, Tensor],
    slots: Tensor,
    angles: tuple[Tensor, Tensor, Tensor],
    norms: tuple[Tensor, Tensor] | None,
    *,
    eps: float,
    offset: float = 0.0,
    values: Tensor | None = None,
    rope: int = 0,
    scales: tuple[Tensor, Tensor] | tuple[None, None] = (None, None),
) -> Tensor:
    """qkv [num_tokens, num_heads + 2 · num_kv_heads, head_dim] → the queries; caches changed.
    angles: cosines and sines, [ropes, n, head_dim / 2] if there are several, and each token's row
    in them."""
    num_tokens, num_all, head_dim = qkv.shape
    num_kv_heads = caches[0].shape[2]
    num_heads = num_all - 2 * num_kv_heads
    query = torch.full((num_tokens, num_heads, head_dim), torch.nan, dtype=qkv.dtype)
    packed = pack_cache(*caches, qkv.dtype)
    cosines, sines, rows = angles
    step = library.structure(
        "step",
        num_tokens=num_tokens,
        slot_mapping=slots,
        cosines=cosines,
        sines=sines,
        rotary_rows=rows,
        rope_stride=cosines[0].numel() if cosines.dim() == 3 else 0,
    )
    library.run(
        "rope_store",
        query=query,
        key_cache=packed[0],
        value_cache=packed[1],
        key_scales=scales[0],
        value_scales=scales[1],
        qkv=qkv,
        query_norm=norms and norms[0],
        key_norm=norms and norms[1],
        step=step,
        block_size=caches[0].shape[1],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        is_int8=caches[0].dtype == torch.int8,
        values=values,
        rope=rope,
        eps=eps,
        norm_offset=offset,
    )
    for cache, stored in zip(caches, unpack_cache(*packed, qkv.dtype), strict=True):
        cache.copy_(stored)
    return query


def quantize_blocks(
    library: CpuLibrary,
    x: Tensor,
    *,
    columns_per_scale: int,
    code_bits: int,
    zero: int,
    outliers: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Bytes and scales of x, sums times -zero, and sums times scales.

    Args:
        outliers: where to put columns and values of its outliers; None: there are none.
    """
    num_rows, size = x.shape
    line, blocks = 32 // code_bits, -(-size // columns_per_scale)
    values = torch.full((num_rows, -(-size // line) * line), 77, dtype=torch.int8)
    scales, float_sums = torch.full((2, num_rows, blocks), torch.nan)
    sums = torch.full((num_rows, blocks), 77, dtype=torch.int32)
    library.run(
        "quantize_blocks",
        bytes=values,
        scales=scales,
        sums=sums,
        float_sums=float_sums,
        outlier_columns=None if outliers is None else outliers[0],
        outlier_values=None if outliers is None else outliers[1],
        most_outliers=0 if outliers is None else outliers[0].shape[1],
        x=x,
        num_rows=ctypes.c_int64(num_rows),
        size=size,
        columns_per_scale=columns_per_scale,
        code_bits=code_bits,
        zero=zero,
    )
    return values, scales, sums, float_sums


def linear_quantized(
    library: CpuLibrary,
    x: Tensor,
    packed: PackedCodes,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """x · matrixᵀ (+ bias) (+ residual)"""
    y = torch.full((len(x), packed.out_features), torch.nan, dtype=x.dtype)
    num_rows = ctypes.c_int64(len(x))
    size = packed.columns_per_scale
    given: dict[str, Tensor] = {"x": x}
    if packed.in_bytes:
        shape = (len(x), packed.most_outliers)
        outliers = torch.full(shape, 77, dtype=torch.int32), torch.full(shape, torch.nan)
        has_outliers = size <= MAX_OUTLIER_BLOCK
        values, scales, sums, float_sums = quantize_blocks(
            library, x, columns_per_scale=size, code_bits=packed.code_bits, zero=packed.zero,
            outliers=outliers if has_outliers else None,
        )  # fmt: skip
        given = {"x": values, "x_scales": scales, "x_sums": sums, "x_float_sums": float_sums}
        if has_outliers:
            given |= dict(zip(("outlier_columns", "outlier_values"), outliers, strict=True))
    elif packed.has_offsets:
        given["x_float_sums"] = torch.full((len(x), packed.num_blocks), torch.nan)
        library.run(
            "sum_blocks",
            sums=given["x_float_sums"],
            x=x,
            num_rows=num_rows,
            size=x.shape[1],
            columns_per_scale=size,
        )
    library.run(
        "linear_quantized",
        y=y,
        bias=bias,
        residual=residual,
        num_rows=num_rows,
        **given,
        **packed.arguments(),
    )
    return y


def embed_quantized(library: CpuLibrary, token_ids: Tensor, packed: PackedCodes) -> Tensor:
    y = torch.full((len(token_ids), packed.in_features), torch.nan, dtype=library.dtype)
    step = library.structure("step", num_tokens=len(token_ids), token_ids=token_ids)
    library.run("embed_quantized", y=y, step=step, **packed.embed_arguments())
    return y


def permute_columns(library: CpuLibrary, x: Tensor, indices: Tensor) -> Tensor:
    y = torch.full_like(x, torch.nan)
    rows = ctypes.c_int64(len(x))
    library.run("permute_columns", y=y, x=x, num_rows=rows, indices=indices, size=x.shape[1])
    return y


def scale_columns(library: CpuLibrary, x: Tensor, factors: Tensor) -> Tensor:
    y = torch.full_like(x, torch.nan)
    rows = ctypes.c_int64(len(x))
    library.run("scale_columns", y=y, x=x, num_rows=rows, factors=factors, size=x.shape[1])
    return y


def add_lora(
    library: CpuLibrary,
    y: Tensor,
    x: Tensor,
    slots: list[int],
    adapters: Sequence[Sequence[tuple[Tensor, Tensor, float] | None]],
    part_sizes: Sequence[int],
) -> Tensor:
    """y with the updates of the rows' adapters. adapters: by slot and part, (A, B, scale)."""
    rows = LoraRows.of(np.array(slots, dtype=np.int64))
    groups = library.structure(
        "lora_rows", num_groups=len(rows.groups), order=rows.order, groups=rows.groups
    )
    table = table_of_pairs(len(adapters), len(part_sizes))
    pairs = [
        [None if each is None else pack_pair(*each, memory=library.memory) for each in adapter]
        for adapter in adapters
    ]
    for slot, adapter in enumerate(pairs):
        for part, pair in enumerate(adapter):
            set_pair(table, slot, part, pair)
    max_rank = max(pair.rank for adapter in pairs for pair in adapter if pair)
    num_chunks = -(-x.shape[1] // CHUNK)
    hidden = torch.full((len(x), len(part_sizes), num_chunks, max_rank), torch.nan)
    shared = {"h": hidden, "pairs": table, "rows": groups, "max_rank": max_rank}
    shared["num_parts"] = len(part_sizes)
    library.run("lora_shrink", x=x, in_features=x.shape[1], **shared)
    result, sizes = y.clone(), torch.tensor(part_sizes)
    library.run(
        "lora_expand",
        y=result,
        part_sizes=sizes,
        num_chunks=num_chunks,
        stride=y.shape[1],
        **shared,
    )
    return result
