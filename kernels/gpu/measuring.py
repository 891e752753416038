"""What measurements of GPU kernels share: a timer, random inputs, sequences with KV in blocks."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.gpu_operations import gpu_operation
from penstock.kernels.paged_layout import PagedLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSizes:
    """Shapes of one layer's attention. Decode runs every pair of `batches` and `contexts`;
    `prefills` are lengths of whole prompts, and the bar holds for `bar_prefill`."""

    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    batches: tuple[int, ...] = (32, 64, 128)
    contexts: tuple[int, ...] = (1024, 4096, 16384)
    long_context: int = 4096  # the bar for decode holds from here
    sweep_batch: int = 64  # of what is measured at the long context alone: FP8
    prefills: tuple[int, ...] = (2048, 8192, 16384)
    bar_prefill: int = 8192
    block_sizes: tuple[int, ...] = (8, 16, 32, 64, 128)  # that are tuned

    @property
    def kv_bytes_per_token(self) -> int:
        """In 16-bit numbers: keys and values of each KV head."""
        return 2 * self.num_kv_heads * self.head_dim * 2


_NUM_WARM_UPS = 3  # the first compiles


class Timer:
    """Median seconds of a call on a device, from cold caches.

    Between two timed calls a buffer larger than any cache is read, not written: dirty cache
    lines would be written back during the measured call. The read also keeps the device busy
    while the next call is launched, so that launching is not timed. On a CPU, wall time is
    measured.
    """

    def __init__(self, device: torch.device, *, flush_bytes: int, num_repeats: int) -> None:
        self._is_cuda = device.type == "cuda"
        self._num_repeats = num_repeats
        self._flushed = torch.ones(flush_bytes // 4, device=device)
        self._sum = torch.empty((), device=device)

    def median_s(self, call: Callable[[], object]) -> float:
        """Seconds of one call on the device, after all earlier work."""
        for _ in range(_NUM_WARM_UPS if self._is_cuda else 1):
            call()
        if self._is_cuda:
            return statistics.median(self._on_stream(call))
        return statistics.median(self._on_wall(call) for _ in range(self._num_repeats))

    def wall_s(self, call: Callable[[], object]) -> float:
        """Wall time of one call with launching, for calls that use several streams."""
        call()
        return statistics.median(self._on_wall(call) for _ in range(self._num_repeats))

    def _on_stream(self, call: Callable[[], object]) -> list[float]:
        cuda: Any = torch.cuda
        moments = [
            (cuda.Event(enable_timing=True), cuda.Event(enable_timing=True))
            for _ in range(self._num_repeats)
        ]
        torch.cuda.synchronize()
        for start, end in moments:
            self._flush()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in moments]

    def _on_wall(self, call: Callable[[], object]) -> float:
        self._flush()
        self._wait()
        began_s = time.perf_counter()
        call()
        self._wait()
        return time.perf_counter() - began_s

    def _flush(self) -> None:
        torch.sum(self._flushed, dim=0, out=self._sum)

    def _wait(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize()


def seconds_of(timer: Timer, call: Callable[[], object]) -> float:
    """Seconds of a call; infinite if its configuration needs more than the device has."""
    triton = importlib.import_module("triton")  # not before it is known whether to interpret
    try:
        return timer.median_s(call)
    except triton.OutOfResources:
        return float("inf")


# -- inputs ---------------------------------------------------------------------------------------


class Draw:
    """Draws numbers on a device, different in every run.

    Args:
        dtype: of numbers, where no other is asked for.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype
        self._generator = torch.Generator(device).manual_seed(time.time_ns())

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Normal numbers."""
        numbers = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return numbers.normal_(generator=self._generator)

    def permutation(self, size: int) -> Tensor:
        """0 … size - 1 in random order: int64 [size]."""
        return torch.randperm(size, generator=self._generator, device=self.device)


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


def attention_inputs(
    draw: Draw,
    sizes: AttentionSizes,
    seq_lens: Sequence[int],
    query_lens: Sequence[int],
    *,
    is_fp8: bool = False,
) -> tuple[Tensor, PagedKV]:
    """A random query [num_tokens, num_heads, head_dim] and KV: sequences of which the last
    `query_lens` tokens are new, in blocks of random order."""
    block_size, num_kv_heads = sizes.block_size, sizes.num_kv_heads
    num_columns = -(-max(seq_lens) // block_size)
    tables = draw.permutation(len(seq_lens) * num_columns).view(-1, num_columns)
    offsets = torch.arange(block_size, device=draw.device)
    slots = (tables[:, :, None] * block_size + offsets).flatten(1)
    new_slots = [
        row[seq_len - query_len : seq_len]
        for row, seq_len, query_len in zip(slots, seq_lens, query_lens, strict=True)
    ]

    def int32(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=draw.device)

    layout = PagedLayout(
        query_start_loc=int32([0, *accumulate(query_lens)]),
        seq_lens=int32(seq_lens),
        block_tables=tables.to(torch.int32),
        slot_mapping=torch.cat(new_slots),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
    )
    shape = (tables.numel(), block_size, num_kv_heads, sizes.head_dim)
    kv = PagedKV(draw.random(*shape), draw.random(*shape), layout)
    if is_fp8:
        fp8 = torch.float8_e4m3fn
        scales = (0.5 + draw.random(num_kv_heads, dtype=torch.float32).abs() for _ in range(2))
        kv = PagedKV(kv.key_cache.to(fp8), kv.value_cache.to(fp8), layout, *scales)
    return draw.random(sum(query_lens), sizes.num_heads, sizes.head_dim), kv


def contiguous(kv: PagedKV) -> PagedKV:
    """Caches read as if each sequence lay in neighbouring blocks: other tokens than in `kv`, but as
    many."""
    tables = kv.layout.block_tables
    in_order = torch.arange(tables.numel(), dtype=torch.int32, device=tables.device)
    return replace(kv, layout=replace(kv.layout, block_tables=in_order.view(tables.shape)))
