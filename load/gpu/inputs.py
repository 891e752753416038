"""Sequences with their KV in blocks, for attention's checks and measurements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor

from penstock.kernels.gpu.quantized import GpuCodes, pack_codes
from penstock.kernels.gpu_operations import gpu_operation
from penstock.kernels.paged_layout import PagedLayout
from penstock.kernels.quantized_codes import QuantizedCodes
from penstock.load.gpu.bench import AttentionSizes, Bench


@dataclass(frozen=True, slots=True)
class PagedKV:
    """Caches [num_blocks, block_size, num_kv_heads, head_dim] and the sequences in them. Scales
    are float32 [num_kv_heads], for FP8 caches."""

    key_cache: Tensor
    value_cache: Tensor
    layout: PagedLayout
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None


def attend(query: Tensor, kv: PagedKV, **options: Any) -> Tensor:
    """Our kernel on query [num_tokens, num_heads, head_dim], with its options for measurements."""
    run: Callable[..., Tensor] = gpu_operation("paged_attention")
    return run(
        query,
        kv.key_cache,
        kv.value_cache,
        kv.layout,
        scale=query.shape[2] ** -0.5,
        key_scale=kv.key_scale,
        value_scale=kv.value_scale,
        **options,
    )


def make_layout(
    bench: Bench, seq_lens: Sequence[int], query_lens: Sequence[int], *, block_size: int
) -> PagedLayout:
    """Sequences of which the last `query_lens` tokens are new, in blocks of random order."""
    num_columns = -(-max(seq_lens) // block_size)
    tables = bench.permutation(len(seq_lens) * num_columns).view(-1, num_columns)
    slots = _slots(tables, block_size)
    new_slots = [
        row[seq_len - query_len : seq_len]
        for row, seq_len, query_len in zip(slots, seq_lens, query_lens, strict=True)
    ]
    return PagedLayout(
        query_start_loc=_int32(bench, [0, *accumulate(query_lens)]),
        seq_lens=_int32(bench, seq_lens),
        block_tables=tables.to(torch.int32),
        slot_mapping=torch.cat(new_slots),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
    )


def random_kv(bench: Bench, layout: PagedLayout, sizes: AttentionSizes) -> PagedKV:
    """Random numbers in every block of the layout."""
    num_blocks = layout.block_tables.numel()
    shape = (num_blocks, sizes.block_size, sizes.num_kv_heads, sizes.head_dim)
    return PagedKV(bench.random(*shape), bench.random(*shape), layout)


def attention_inputs(
    bench: Bench,
    sizes: AttentionSizes,
    seq_lens: Sequence[int],
    query_lens: Sequence[int],
    *,
    is_fp8: bool = False,
) -> tuple[Tensor, PagedKV]:
    """A random query [num_tokens, num_heads, head_dim] and KV."""
    layout = make_layout(bench, seq_lens, query_lens, block_size=sizes.block_size)
    kv = random_kv(bench, layout, sizes)
    query = bench.random(sum(query_lens), sizes.num_heads, sizes.head_dim)
    return query, in_fp8(bench, kv) if is_fp8 else kv


def in_fp8(bench: Bench, kv: PagedKV) -> PagedKV:
    """The caches rounded to FP8, and some scales."""
    fp8, num_kv_heads = torch.float8_e4m3fn, kv.key_cache.shape[2]
    scales = (0.5 + bench.random(num_kv_heads, dtype=torch.float32).abs() for _ in range(2))
    return PagedKV(kv.key_cache.to(fp8), kv.value_cache.to(fp8), kv.layout, *scales)


def contiguous(kv: PagedKV) -> PagedKV:
    """The same caches, read as if each sequence lay in neighbouring blocks: other tokens, but as
    many."""
    tables = kv.layout.block_tables
    in_order = torch.arange(tables.numel(), dtype=torch.int32, device=tables.device)
    return replace(kv, layout=replace(kv.layout, block_tables=in_order.view(tables.shape)))


def poison_unowned(kv: PagedKV) -> None:
    """Write NaN to every slot that holds no token of a sequence."""
    slots = _slots(kv.layout.block_tables.long(), kv.key_cache.shape[1])
    positions = torch.arange(slots.shape[1], device=slots.device)
    unowned = slots[positions >= kv.layout.seq_lens[:, None]]
    for cache in (kv.key_cache, kv.value_cache):
        cache.flatten(0, 1)[unowned] = torch.nan


def _slots(tables: Tensor, block_size: int) -> Tensor:
    """tables int64 [num_seqs, num_columns] → the slot of each position, one row per sequence."""
    offsets = torch.arange(block_size, device=tables.device)
    return (tables[:, :, None] * block_size + offsets).flatten(1)


def _int32(bench: Bench, values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=bench.device)


_TEMPERATURE, _TOP_P = 0.8, 0.95
_SPREAD = 3.0  # standard deviation of logits, about as models have it


def sampling_inputs(bench: Bench, num_rows: int, vocab_size: int) -> tuple[Tensor, ...]:
    """Logits, temperature, top_k (none), top_p, min_p (none) and uniforms."""

    def column(value: float) -> Tensor:
        return torch.full((num_rows,), value, dtype=torch.float64, device=bench.device)

    logits = _SPREAD * bench.random(num_rows, vocab_size)
    uniforms = bench.random(num_rows, dtype=torch.float64).abs() % 1
    return logits, column(_TEMPERATURE), column(0.0), column(_TOP_P), column(0.0), uniforms


def sample(inputs: tuple[Tensor, ...], **options: Any) -> Tensor:
    """Token ids [num_rows], by our kernel with its options for measurements."""
    token_ids: Tensor = gpu_operation("sample_tokens", "sampling")(*inputs, **options)[0]
    return token_ids


QUANTIZED = ("int4", "int8", "fp8")
_BLOCK = 128  # columns of a scale, but for fp8: it has one for each row


def quantized_matrix(bench: Bench, kind: str, out_features: int, in_features: int) -> GpuCodes:
    """Random codes of a kind of QUANTIZED, and scales that make numbers around 1."""
    values = bench.random(out_features, in_features)
    block = in_features if kind == "fp8" else _BLOCK
    scales = bench.random(out_features, -(-in_features // block), dtype=torch.float32).abs() + 0.5
    bits = 4 if kind == "int4" else 8
    if kind == "fp8":
        codes = values.to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        zero, spread = 1 << (bits - 1), 1 << (bits - 3)
        codes = (values.float() * spread + zero).round().clamp(0, 2 * zero - 1).to(torch.uint8)
        scales /= spread
    matrix = QuantizedCodes(
        codes=codes, bits=bits, scales=scales, columns_per_scale=block,
        zero=0 if kind == "fp8" else zero, is_float8=kind == "fp8",
    )  # fmt: skip
    return pack_codes(matrix, values)


def multiply(x: Tensor, matrix: GpuCodes, *, in_bytes: bool, **options: Any) -> Tensor:
    """x · matrixᵀ by our kernel, with its options for measurements."""
    product: Tensor = gpu_operation("linear_quantized")(x, matrix, in_bytes=in_bytes, **options)
    return product


T = TypeVar("T")


def worst_row(result: Tensor, exact: Tensor) -> float:
    """The largest ‖result − exact‖ ÷ ‖exact‖ of all rows (over the last dimension); NaN if any
    number of the result is."""
    differences = (result.double() - exact).norm(dim=-1)
    return float((differences / exact.norm(dim=-1)).max())


def num_wrong_bytes(result: Tensor, exact: Tensor) -> float:
    """Of two contiguous tensors; a NaN equals itself."""
    return float((result.view(torch.uint8) != exact.view(torch.uint8)).sum())


def bound_of(dtype: torch.dtype) -> float:
    """The limit of `worst_row`: numbers are rounded to `dtype` a few times on their way."""
    return 2 * torch.finfo(dtype).eps


def poisoned(call: Callable[[], T]) -> T:
    """The result of a call for which torch fills new tensors with NaN, so that unwritten memory
    shows."""
    settings: Any = torch.utils.deterministic
    assert settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return call()
    finally:
        torch.use_deterministic_algorithms(False)
