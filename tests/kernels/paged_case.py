"""Sequences in a paged cache, with everything an attention kernel can be asked for."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from penstock.kernels import int8_cache
from penstock.kernels.paged_layout import PagedLayout

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, kw_only=True)
class CaseShape:
    """
    Attributes:
        step: (tokens in the cache before the step, tokens of the step) of each sequence.
        heads: (num_heads, num_kv_heads)
        num_shared: blocks at their beginnings that sequences have in common, as far as they
            were in the cache before the step.
    """

    step: list[tuple[int, int]]
    block_size: int = 16
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 32
    dtype: torch.dtype = torch.float32
    is_fp8: bool = False
    is_int8: bool = False
    has_sinks: bool = False
    has_alibi: bool = False
    window: int | None = None
    soft_cap: float | None = None
    num_shared: int = 0


class PagedCase:
    """Random keys and values in scattered blocks.

    What no token of the step may read holds NaN: slots that no sequence owns, as a freed block
    may, and slots behind every window. Table entries past a sequence's end name no block at all.
    """

    def __init__(self, shape: CaseShape, *, seed: int = 5, device: str = "cpu") -> None:
        self.shape, self.device = shape, torch.device(device)
        self._generator = torch.Generator(self.device).manual_seed(seed)
        num_heads, num_kv_heads = shape.heads
        self.totals = [before + new for before, new in shape.step]
        num_new = sum(new for _, new in shape.step)
        self.query = self._random(num_new, num_heads, shape.head_dim).to(shape.dtype)
        self.sinks = self._random(num_heads).to(shape.dtype) if shape.has_sinks else None
        self.alibi = 0.1 * self._random(num_heads).abs() if shape.has_alibi else None
        self.key_scale = self.value_scale = None
        if shape.is_fp8:
            self.key_scale = 0.01 + 0.01 * self._random(num_kv_heads).abs()
            self.value_scale = 0.01 + 0.01 * self._random(num_kv_heads).abs()
        self.tables = self._allocate()  # block ids of each sequence
        num_blocks = max((int(table.max()) for table in self.tables if len(table)), default=0) + 3
        cache_shape = (num_blocks, shape.block_size, num_kv_heads, shape.head_dim)
        self.key_cache = self._stored(self._random(*cache_shape), self.key_scale)
        self.value_cache = self._stored(self._random(*cache_shape), self.value_scale)
        self._spoil_what_is_not_read()
        self.layout = self._layout()

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of `paged_attention`."""
        return {
            "scale": self.shape.head_dim**-0.5,
            "window": self.shape.window,
            "soft_cap": self.shape.soft_cap,
            "sinks": self.sinks,
            "alibi": self.alibi,
            "key_scale": self.key_scale,
            "value_scale": self.value_scale,
        }

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, PagedLayout]:
        """The positional arguments of `paged_attention`."""
        return self.query, self.key_cache, self.value_cache, self.layout

    def expected(self) -> Tensor:
        """The definition, token by token: float64 [num_tokens, num_heads, head_dim]."""
        shape = self.shape
        group = shape.heads[0] // shape.heads[1]
        output = torch.zeros(self.query.shape, dtype=torch.float64, device=self.device)
        for seq, (start, end) in enumerate(pairwise(self.layout.query_start_loc.tolist())):
            slots = self._slots(seq)
            keys = self._numbers(self.key_cache, self.key_scale, slots)
            values = self._numbers(self.value_cache, self.value_scale, slots)
            keys, values = (each.repeat_interleave(group, dim=1) for each in (keys, values))
            for token in range(start, end):
                stop = int(self.layout.seq_lens[seq]) - (end - 1 - token)
                seen = slice(0 if shape.window is None else max(0, stop - shape.window), stop)
                scores = torch.einsum("hd,phd->hp", self.query[token].double(), keys[seen])
                scores *= shape.head_dim**-0.5
                if self.alibi is not None:
                    distances = torch.arange(seen.start, stop, device=self.device) - (stop - 1)
                    scores += self.alibi.double()[:, None] * distances
                if shape.soft_cap is not None:
                    scores = shape.soft_cap * (scores / shape.soft_cap).tanh()
                if self.sinks is not None:
                    scores = torch.cat([scores, self.sinks.double()[:, None]], dim=1)
                weights = scores.softmax(1)[:, : stop - seen.start]
                output[token] = torch.einsum("hp,phd->hd", weights, values[seen])
        return output

    def only(self, seq: int) -> PagedCase:
        """One sequence of a step in which each has one token."""
        layout = self.layout
        return self._with(
            self.query[seq : seq + 1],
            query_start_loc=layout.query_start_loc[:2],
            seq_lens=layout.seq_lens[seq : seq + 1],
            block_tables=layout.block_tables[seq : seq + 1],
            slot_mapping=layout.slot_mapping[seq : seq + 1],
            max_seq_len=self.totals[seq],
        )

    def last(self, num_tokens: int) -> PagedCase:
        """The step's last tokens, as the last chunk of its one sequence has them."""
        return self._with(
            self.query[-num_tokens:],
            query_start_loc=self._int32([0, num_tokens]),
            slot_mapping=self.layout.slot_mapping[-num_tokens:],
            max_query_len=num_tokens,
        )

    def padded(self, *, num_empty: int, num_zero: int) -> PagedCase:
        """With sequences of one token and no keys at the end, and others of no tokens."""
        layout, num_more, num_tokens = self.layout, num_empty + num_zero, len(self.query)
        starts = [num_tokens + n for n in range(1, num_zero + 1)]
        starts += [num_tokens + num_zero] * num_empty
        table, slots = layout.block_tables, layout.slot_mapping
        rows = self._random(num_zero, *self.query.shape[1:]).to(self.query.dtype)
        return self._with(
            torch.cat([self.query, rows]),
            query_start_loc=torch.cat([layout.query_start_loc, self._int32(starts)]),
            seq_lens=torch.cat([layout.seq_lens, self._int32([0] * num_more)]),
            block_tables=torch.cat([table, table.new_full((num_more, table.shape[1]), 10**6)]),
            slot_mapping=torch.cat([slots, slots.new_full((num_zero,), -1)]),
        )

    def _with(self, query: Tensor, **layout: Any) -> PagedCase:
        """The same cache in another step; it has no `expected` of its own."""
        other = copy.copy(self)
        other.query, other.layout = query, replace(self.layout, **layout)
        return other

    def spoil(self, seq: int) -> None:
        """NaN in all that sequence `seq` owns."""
        for cache in (self.key_cache, self.value_cache):
            self._fill_nan(cache, self._slots(seq))

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, device=self.device)

    def _int32(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=self.device)

    def _allocate(self) -> list[Tensor]:
        """Scattered blocks for each sequence, those at the beginning shared as asked for."""
        size = self.shape.block_size
        counts = [-(-total // size) for total in self.totals]
        ids = torch.randperm(
            sum(counts) + self.shape.num_shared, generator=self._generator, device=self.device
        )
        shared, *own = ids.split([self.shape.num_shared, *counts])
        tables = []
        for (before, _), blocks in zip(self.shape.step, own, strict=True):
            num_shared = min(self.shape.num_shared, before // size)
            tables.append(torch.cat([shared[:num_shared], blocks[num_shared:]]))
        return tables

    def _slots(self, seq: int) -> Tensor:
        """Of all positions of a sequence: int64 [total]."""
        size, blocks = self.shape.block_size, self.tables[seq]
        offsets = torch.arange(size, device=self.device)
        slots = (blocks[:, None] * size + offsets).flatten()
        return slots[: self.totals[seq]]

    def _stored(self, numbers: Tensor, scale: Tensor | None) -> Tensor:
        if self.shape.is_int8:
            return int8_cache.encode(numbers.to(self.shape.dtype))
        if scale is None:
            return numbers.to(self.shape.dtype)
        return (numbers / scale[:, None]).clamp(-448, 448).to(FP8)

    def _numbers(self, cache: Tensor, scale: Tensor | None, slots: Tensor) -> Tensor:
        """What a cache holds at slots: float64 [num_slots, num_kv_heads, head_dim]."""
        if self.shape.is_int8:
            return int8_cache.decode(cache.flatten(0, 1)[slots]).double()
        if scale is None:
            return cache.flatten(0, 1)[slots].double()
        stored = cache.view(torch.uint8).flatten(0, 1)[slots].view(FP8)
        return stored.double() * scale.double()[:, None]

    def _fill_nan(self, cache: Tensor, slots: Tensor) -> None:
        nan = torch.tensor(torch.nan, device=self.device).to(cache.dtype)
        if cache.dtype == torch.int8:
            nan.fill_(-1)  # so are all bytes of a NaN, of which the scale then is one
        elif cache.dtype == FP8:
            cache, nan = cache.view(torch.uint8), nan.view(torch.uint8)
        cache.flatten(0, 1)[slots] = nan

    def _spoil_what_is_not_read(self) -> None:
        num_slots = self.key_cache.shape[0] * self.shape.block_size
        is_read = torch.zeros(num_slots, dtype=torch.bool, device=self.device)
        for seq, (before, _) in enumerate(self.shape.step):
            first = 0
            if self.shape.window is not None:
                first = max(0, before + 1 - self.shape.window)
            is_read[self._slots(seq)[first:]] = True
        for cache in (self.key_cache, self.value_cache):
            self._fill_nan(cache, (~is_read).nonzero().flatten())

    def _layout(self) -> PagedLayout:
        step = self.shape.step
        table = torch.full(
            (len(step), max(map(len, self.tables))), 10**6, dtype=torch.int32, device=self.device
        )
        for row, blocks in zip(table, self.tables, strict=True):
            row[: len(blocks)] = blocks
        starts = [0]
        for _, new in step:
            starts.append(starts[-1] + new)
        return PagedLayout(
            query_start_loc=self._int32(starts),
            seq_lens=self._int32(self.totals),
            block_tables=table,
            slot_mapping=torch.cat(
                [self._slots(seq)[before:] for seq, (before, _) in enumerate(step)]
            ),
            max_query_len=max(new for _, new in step),
            max_seq_len=max(self.totals),
        )
