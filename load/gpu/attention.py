"""Attention of one layer: decode compared with copy bandwidth, prefill with matrix products.

Decode reads every key and value once for the heads that share it, so its bytes are those of the
KV. It is compared with the same kernel without the block table look-up, over contiguous KV and
in the fastest of several configurations; paged sequences lie in random blocks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from penstock.load.gpu.bench import FEW_DECODE, AttentionSizes, Bench, fastest_s
from penstock.load.gpu.inputs import (
    PagedKV,
    attend,
    attention_inputs,
    contiguous,
)
from penstock.load.gpu.operations import COPY, MATMUL

_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
Run = Callable[[], Tensor]


def fastest_sdpa(bench: Bench, runs: dict[str, Run]) -> tuple[str, float]:
    """The fastest of some equivalent calls over all backends: its name and seconds."""
    seconds = {}
    for form, run in runs.items():
        for name, backend in _BACKENDS.items():
            with warnings.catch_warnings(), sdpa_kernel(backend):
                warnings.simplefilter("ignore")  # they tell what a backend cannot do
                try:
                    seconds[f"{name}, {form}"] = bench.timer.median_s(run)
                except RuntimeError:  # it cannot do this
                    continue
    return min(seconds.items(), key=lambda item: item[1])


def decode_runs(query: Tensor, keys: Tensor, values: Tensor) -> dict[str, Run]:
    """query [batch, num_heads, head_dim]; keys, values [batch, context, num_kv_heads, head_dim].
    The heads of a KV head may be passed as query positions."""
    batch, _, num_kv_heads, head_dim = keys.shape
    by_head = query[:, :, None]  # [batch, num_heads, 1, head_dim]
    grouped = query.view(batch, num_kv_heads, -1, head_dim)  # [batch, num_kv_heads, group, …]
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    return {
        "grouped": lambda: F.scaled_dot_product_attention(grouped, keys, values),
        "GQA": lambda: F.scaled_dot_product_attention(by_head, keys, values, enable_gqa=True),
    }


def prefill_runs(query: Tensor, keys: Tensor, values: Tensor) -> dict[str, Run]:
    """query [length, num_heads, head_dim]; keys, values [length, num_kv_heads, head_dim]."""
    query, keys, values = (each.transpose(0, 1)[None] for each in (query, keys, values))
    return {
        "GQA": lambda: F.scaled_dot_product_attention(
            query, keys, values, is_causal=True, enable_gqa=True
        )
    }


_FIXED_SPLIT_LEN = 1024  # a length that no batch changes: what determinism costs


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCell:
    """One token for each of `batch` sequences of `context` tokens."""

    batch: int
    context: int
    block_size: int
    is_fp8: bool = False

    def num_bytes(self, sizes: AttentionSizes) -> int:
        """Keys and values of each KV head."""
        num_bytes = self.batch * self.context * sizes.kv_bytes_per_token
        return num_bytes // 2 if self.is_fp8 else num_bytes

    def __str__(self) -> str:
        kv = ", FP8" if self.is_fp8 else ""
        return f"{self.batch} × {self.context}, blocks of {self.block_size}{kv}"


def measure_decode(bench: Bench) -> None:
    """Every batch with every context, and one of them in FP8."""
    sizes = bench.sizes.attention
    cells = [
        DecodeCell(batch=batch, context=context, block_size=sizes.block_size)
        for context, batch in product(sizes.contexts, sizes.batches)
    ]
    one = DecodeCell(
        batch=sizes.sweep_batch, context=sizes.long_context, block_size=sizes.block_size
    )
    in_fp8 = replace(one, is_fp8=True)
    in_time = bench.in_time("decode_attention", [*cells, in_fp8])
    rows = {cell: _decode_row(bench, cell) for cell in in_time}
    rows.pop(in_fp8, None)
    long = [cell for cell in cells if cell.context >= sizes.long_context]
    of_copy = [rows[cell]["of_copy"] for cell in long if cell in rows]
    bench.conclude("decode_attention_of_copy", of_copy, num_cells=len(long))
    ratios = [row["over_contiguous"] for row in rows.values()]
    bench.conclude("paged_over_contiguous", ratios, num_cells=len(cells))


def measure_block_sizes(bench: Bench) -> None:
    """One batch of decodes with every block size."""
    sizes = bench.sizes.attention
    cells = [
        DecodeCell(batch=sizes.sweep_batch, context=sizes.long_context, block_size=block_size)
        for block_size in sizes.block_sizes
    ]
    for cell in bench.in_time("block_sizes", cells):
        query, kv = _decode_inputs(bench, cell)
        seconds = bench.timer.median_s(lambda query=query, kv=kv: attend(query, kv))  # type: ignore[misc]
        row = {"block_size": cell.block_size, **_decode_share(bench, cell, seconds)}
        bench.results.add_row("block_sizes", row)


def measure_prefill(bench: Bench) -> None:
    """Whole prompts of every length."""
    sizes = bench.sizes.attention
    for length in bench.in_time("prefill_attention", sizes.prefills):
        row = _prefill_row(bench, length)
        if length == sizes.bar_prefill:
            bench.conclude("prefill_attention_of_matmul", [row["of_matmul"]], num_cells=1)


def causal_flop(sizes: AttentionSizes, length: int) -> int:
    """FLOP of scores and of mixing values, over all pairs of visible positions."""
    return 4 * sizes.num_heads * sizes.head_dim * (length * (length + 1) // 2)


# -- rows -------------------------------------------------------------------------------------


def _decode_row(bench: Bench, cell: DecodeCell) -> Mapping[str, Any]:
    """Paged, with fixed splits, contiguous, and by SDPA."""
    query, kv = _decode_inputs(bench, cell)
    timer = bench.timer
    paged_s = timer.median_s(lambda: attend(query, kv))
    fixed_s = timer.median_s(lambda: attend(query, kv, split_len=_FIXED_SPLIT_LEN))
    side_by_side = partial(attend, query, contiguous(kv), is_contiguous=True)
    contiguous_s = fastest_s(timer, side_by_side, FEW_DECODE)
    row: dict[str, Any] = {
        "kv": "FP8" if cell.is_fp8 else "16 bits",
        **_decode_share(bench, cell, paged_s),
        "over_contiguous": paged_s / contiguous_s,
        "fixed_splits_over": fixed_s / paged_s,
    }
    if not cell.is_fp8:  # SDPA has none
        backend, sdpa_s = fastest_sdpa(bench, decode_runs(query, *_in_sequence(kv, cell)))
        row |= {"sdpa": backend, "over_sdpa": paged_s / sdpa_s}
    bench.results.add_row("decode_attention", row)
    return row


def _decode_share(bench: Bench, cell: DecodeCell, seconds: float) -> dict[str, Any]:
    rate = cell.num_bytes(bench.sizes.attention) / seconds
    return {
        "batch": cell.batch,
        "context": cell.context,
        "ms": 1e3 * seconds,
        "bytes_per_s": rate,
        "of_copy": rate / bench.results.ceilings[COPY],
    }


def _prefill_row(bench: Bench, length: int) -> Mapping[str, Any]:
    sizes = bench.sizes.attention
    query, kv = attention_inputs(bench, sizes, [length], [length])
    seconds = bench.timer.median_s(lambda: attend(query, kv))
    keys, values = (bench.random(length, sizes.num_kv_heads, sizes.head_dim) for _ in range(2))
    backend, sdpa_s = fastest_sdpa(bench, prefill_runs(query, keys, values))
    rate = causal_flop(sizes, length) / seconds
    row: dict[str, Any] = {"prompt": length, "ms": 1e3 * seconds, "flop_per_s": rate}
    row |= {"of_matmul": rate / bench.results.ceilings[MATMUL]}
    row |= {"sdpa": backend, "over_sdpa": seconds / sdpa_s}
    bench.results.add_row("prefill_attention", row)
    return row


def _decode_inputs(bench: Bench, cell: DecodeCell) -> tuple[Tensor, PagedKV]:
    sizes = replace(bench.sizes.attention, block_size=cell.block_size)
    lens = [cell.context] * cell.batch
    return attention_inputs(bench, sizes, lens, [1] * cell.batch, is_fp8=cell.is_fp8)


def _in_sequence(kv: PagedKV, cell: DecodeCell) -> list[Tensor]:
    """Keys and values as [batch, context, num_kv_heads, head_dim], in any order."""
    return [
        cache.view(cell.batch, -1, *cache.shape[2:])[:, : cell.context]
        for cache in (kv.key_cache, kv.value_cache)
    ]
