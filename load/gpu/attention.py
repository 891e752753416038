"""Attention of one layer: decode compared with copy bandwidth, prefill with matrix products.

Decode reads every key and value once for the heads that share it, so its bytes are those of the
KV. It is compared with the same kernel without the block table look-up, over contiguous KV and
in the fastest of several configurations; paged sequences lie in random blocks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from penstock.kernels.gpu.measuring import (
    AttentionSizes,
    attend,
    attention_inputs,
    contiguous,
    seconds_of,
)
from penstock.kernels.gpu.tuning import Config
from penstock.load.gpu.bench import COPY, MATMUL, Bench

_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
Run = Callable[[], Tensor]
# Launch configurations worth trying; the tuner tries more.
FEW_DECODE: tuple[Config | None, ...] = (
    None,  # the launcher's own choice
    {"BLOCK_N": 32, "num_warps": 2, "num_stages": 4},
    {"BLOCK_N": 64, "num_warps": 4, "num_stages": 2},
    {"BLOCK_N": 64, "num_warps": 4, "num_stages": 4},
    {"BLOCK_N": 128, "num_warps": 4, "num_stages": 2},
    {"BLOCK_N": 128, "num_warps": 8, "num_stages": 3},
)


def fastest_sdpa(bench: Bench, runs: Mapping[str, Run]) -> tuple[str, float]:
    """The fastest of some equivalent calls over all backends: its name and seconds."""
    seconds = {}
    for (form, run), (name, backend) in product(runs.items(), _BACKENDS.items()):
        with warnings.catch_warnings(), sdpa_kernel(backend):
            warnings.simplefilter("ignore")  # they tell what a backend cannot do
            try:
                seconds[f"{name}, {form}"] = bench.timer.median_s(run)
            except RuntimeError:  # it cannot do this
                continue
    return min(seconds.items(), key=lambda item: item[1])


# -- sections -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCell:
    """One token for each of `batch` sequences of `context` tokens."""

    batch: int
    context: int
    is_fp8: bool = False

    def num_bytes(self, sizes: AttentionSizes) -> int:
        """Keys and values of each KV head."""
        num_bytes = self.batch * self.context * sizes.kv_bytes_per_token
        return num_bytes // 2 if self.is_fp8 else num_bytes

    def __str__(self) -> str:
        return f"{self.batch} × {self.context}{', FP8' * self.is_fp8}"


def measure_decode(bench: Bench) -> None:
    """Every batch with every context, and one of them in FP8."""
    sizes = bench.sizes.attention
    cells = [
        DecodeCell(batch=batch, context=context)
        for context, batch in product(sizes.contexts, sizes.batches)
    ]
    in_fp8 = DecodeCell(batch=sizes.sweep_batch, context=sizes.long_context, is_fp8=True)
    in_time = bench.in_time("decode_attention", [*cells, in_fp8])
    rows = {cell: _decode_row(bench, cell) for cell in in_time}
    rows.pop(in_fp8, None)
    long = [cell for cell in cells if cell.context >= sizes.long_context]
    of_copy = [rows[cell]["of_copy"] for cell in long if cell in rows]
    bench.results.conclude("decode_attention_of_copy", of_copy, num_cells=len(long))
    ratios = [row["over_contiguous"] for row in rows.values()]
    bench.results.conclude("paged_over_contiguous", ratios, num_cells=len(cells))


def measure_prefill(bench: Bench) -> None:
    """Whole prompts of every length."""
    sizes = bench.sizes.attention
    for length in bench.in_time("prefill_attention", sizes.prefills):
        row = _prefill_row(bench, length)
        if length == sizes.bar_prefill:
            name = "prefill_attention_of_matmul"
            bench.results.conclude(name, [row["of_matmul"]], num_cells=1)


def causal_flop(sizes: AttentionSizes, length: int) -> int:
    """FLOP of scores and of mixing values, over all pairs of visible positions."""
    return 4 * sizes.num_heads * sizes.head_dim * (length * (length + 1) // 2)


def _decode_row(bench: Bench, cell: DecodeCell) -> Mapping[str, Any]:
    """Paged, contiguous, and by SDPA."""
    sizes, timer = bench.sizes.attention, bench.timer
    lens, ones = [cell.context] * cell.batch, [1] * cell.batch
    query, kv = attention_inputs(bench.draw, sizes, lens, ones, is_fp8=cell.is_fp8)
    paged_s = timer.median_s(lambda: attend(query, kv))
    side_by_side = partial(attend, query, contiguous(kv), is_contiguous=True)
    rate = cell.num_bytes(sizes) / paged_s
    row: dict[str, Any] = {
        "kv": "FP8" if cell.is_fp8 else "16 bits",
        "batch": cell.batch,
        "context": cell.context,
        "ms": 1e3 * paged_s,
        "bytes_per_s": rate,
        "of_copy": rate / bench.results.ceilings[COPY],
        "over_contiguous": paged_s
        / min(seconds_of(timer, partial(side_by_side, config=each)) for each in FEW_DECODE),
    }
    if not cell.is_fp8:  # SDPA has none
        keys, values = (
            cache.view(cell.batch, -1, *cache.shape[2:])[:, : cell.context].transpose(1, 2)
            for cache in (kv.key_cache, kv.value_cache)
        )
        # The heads of a KV head may be passed as query positions.
        grouped = query.view(cell.batch, sizes.num_kv_heads, -1, sizes.head_dim)
        sdpa = F.scaled_dot_product_attention
        runs = {
            "grouped": lambda: sdpa(grouped, keys, values),
            "GQA": lambda: sdpa(query[:, :, None], keys, values, enable_gqa=True),
        }
        backend, sdpa_s = fastest_sdpa(bench, runs)
        row |= {"sdpa": backend, "over_sdpa": paged_s / sdpa_s}
    bench.results.add_row("decode_attention", row)
    return row


def _prefill_row(bench: Bench, length: int) -> Mapping[str, Any]:
    sizes = bench.sizes.attention
    query, kv = attention_inputs(bench.draw, sizes, [length], [length])
    seconds = bench.timer.median_s(lambda: attend(query, kv))
    keys, values = (bench.draw.random(length, sizes.num_kv_heads, sizes.head_dim) for _ in range(2))
    heads = [each.transpose(0, 1)[None] for each in (query, keys, values)]
    sdpa: Callable[..., Tensor] = F.scaled_dot_product_attention
    run = partial(sdpa, *heads, is_causal=True, enable_gqa=True)
    backend, sdpa_s = fastest_sdpa(bench, {"GQA": run})
    rate = causal_flop(sizes, length) / seconds
    row: dict[str, Any] = {"prompt": length, "ms": 1e3 * seconds, "flop_per_s": rate}
    row |= {"of_matmul": rate / bench.results.ceilings[MATMUL]}
    row |= {"sdpa": backend, "over_sdpa": seconds / sdpa_s}
    bench.results.add_row("prefill_attention", row)
    return row
