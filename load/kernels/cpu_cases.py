"""The C kernels and the same work in torch, on data that no cache holds.

Every case comes in copies, which are used in turn. Knows nothing of clocks and tables.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from ctypes import Structure, addressof
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.cpu.library import CpuLibrary
from penstock.kernels.cpu.structures import (
    AttentionArgs,
    LinearArgs,
    RmsNormArgs,
    RopeStoreArgs,
    SiluMulArgs,
    Step,
)

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
_EPS = 1e-5
_MAX_COPIES = 64  # of a small operation, whose data come from a cache in use too


@dataclass(frozen=True, slots=True)
class Copy:
    """One of a case's sets of tensors.

    Attributes:
        ours: runs the C kernel, which leaves its result in `out`.
        theirs: computes the same of `inputs` in torch.
        kept: what `ours` points to beside them.
    """

    ours: Callable[[], None]
    theirs: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    out: Tensor
    kept: tuple[Any, ...]

    def error(self) -> float:
        """‖ours − the same in float64‖ ÷ ‖that‖."""
        self.out.fill_(torch.nan)
        self.ours()
        exact = self.theirs(*(each.double() for each in self.inputs))
        return float((self.out.double() - exact).norm() / exact.norm())


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An operation on one shape.

    Attributes:
        num_bytes: that a call must read and write, each once.
        num_flop: of its matrix products.
    """

    name: str
    copies: tuple[Copy, ...]
    num_bytes: int
    num_flop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseMaker:
    """Makes cases for one dtype.

    Attributes:
        min_bytes: of all copies of a case together, if so many are not too many.
    """

    library: CpuLibrary
    min_bytes: int

    def linear(self, num_rows: int, in_features: int, out_features: int) -> Case:
        """Rows by a weight, as between any two layers."""

        def copy() -> Copy:
            x, weight = self._random(num_rows, in_features), self._random(out_features, in_features)
            packed, rows = self.library.pack(weight), ctypes.c_int64(num_rows)
            y = self._empty(num_rows, out_features)
            args = LinearArgs(
                y=y.data_ptr(),
                x=x.data_ptr(),
                weight=packed.data_ptr(),
                num_rows=addressof(rows),
                in_features=in_features,
                out_features=out_features,
            )
            return Copy(self._call("linear", args), F.linear, (x, weight), y, (packed, rows))

        numbers = num_rows * in_features + out_features * in_features + num_rows * out_features
        return self._case(
            f"linear {in_features:,} → {out_features:,}, rows: {num_rows}",
            copy,
            numbers,
            num_flop=2 * num_rows * in_features * out_features,
        )

    def decode_attention(self, num_seqs: int, context: int) -> Case:
        """A token of each sequence over its KV: ours through random block tables, torch's SDPA
        over KV that lies side by side."""

        def copy() -> Copy:
            query = self._random(num_seqs, NUM_HEADS, HEAD_DIM)
            keys, values = (
                self._random(num_seqs, context, NUM_KV_HEADS, HEAD_DIM) for _ in range(2)
            )
            tables = torch.randperm(num_seqs * -(-context // BLOCK_SIZE)).to(torch.int32)
            tables = tables.view(num_seqs, -1)
            key_cache, value_cache = self._stored(keys, values, tables)
            step = _DecodeStep(tables, context)
            out = torch.full_like(query, torch.nan)
            args = AttentionArgs(
                out=out.data_ptr(),
                query=query.data_ptr(),
                key_cache=key_cache.data_ptr(),
                value_cache=value_cache.data_ptr(),
                step=addressof(step.step),
                block_size=BLOCK_SIZE,
                num_heads=NUM_HEADS,
                num_kv_heads=NUM_KV_HEADS,
                head_dim=HEAD_DIM,
                scale=HEAD_DIM**-0.5,
            )
            inputs = (query, *(each.transpose(1, 2).contiguous() for each in (keys, values)))
            kept = (key_cache, value_cache, step)
            return Copy(self._call("attention", args), _sdpa, inputs, out, kept)

        numbers = num_seqs * HEAD_DIM * 2 * (NUM_HEADS + context * NUM_KV_HEADS)
        return self._case(
            f"decode attention, sequences: {num_seqs}, context {context:,}",
            copy,
            numbers,
            num_flop=4 * num_seqs * NUM_HEADS * HEAD_DIM * context,
        )

    def _stored(self, keys: Tensor, values: Tensor, tables: Tensor) -> tuple[Tensor, Tensor]:
        """A cache with these in it, by the kernel that stores them: it knows how they lie there.

        Keys are turned by no angle, and have one query head each beside them.
        """
        _, context, num_heads, head_dim = keys.shape
        positions = torch.arange(context)
        blocks = tables[:, positions // BLOCK_SIZE].long()
        slots = (blocks * BLOCK_SIZE + positions % BLOCK_SIZE).flatten()
        qkv = torch.cat([keys, keys, values], dim=2)
        query = torch.empty_like(keys)
        caches = [self._empty(tables.numel(), BLOCK_SIZE, num_heads, head_dim) for _ in "kv"]
        cosines, sines = torch.ones(head_dim // 2), torch.zeros(head_dim // 2)
        rows = torch.zeros_like(slots)
        step = Step(
            num_tokens=len(slots),
            slot_mapping=slots.data_ptr(),
            cosines=cosines.data_ptr(),
            sines=sines.data_ptr(),
            rotary_rows=rows.data_ptr(),
        )
        args = RopeStoreArgs(
            query=query.data_ptr(),
            key_cache=caches[0].data_ptr(),
            value_cache=caches[1].data_ptr(),
            qkv=qkv.data_ptr(),
            step=addressof(step),
            block_size=BLOCK_SIZE,
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=head_dim,
        )
        self.library.run("rope_store", args)
        return caches[0], caches[1]

    def rms_norm(self, num_rows: int, size: int) -> Case:
        def copy() -> Copy:
            x, weight = self._random(num_rows, size), self._random(size)
            rows = ctypes.c_int64(num_rows)
            y = self._empty(num_rows, size)
            args = RmsNormArgs(
                y=y.data_ptr(),
                x=x.data_ptr(),
                weight=weight.data_ptr(),
                num_rows=addressof(rows),
                size=size,
                eps=_EPS,
            )
            return Copy(self._call("rms_norm", args), _rms_norm, (x, weight), y, (rows,))

        return self._case(f"rms_norm {size:,}, rows: {num_rows}", copy, 2 * num_rows * size)

    def silu_mul(self, num_rows: int, size: int) -> Case:
        def copy() -> Copy:
            x, rows = self._random(num_rows, 2 * size), ctypes.c_int64(num_rows)
            y = self._empty(num_rows, size)
            args = SiluMulArgs(y=y.data_ptr(), x=x.data_ptr(), num_rows=addressof(rows), size=size)
            return Copy(self._call("silu_mul", args), _silu_and_mul, (x,), y, (rows,))

        return self._case(f"silu_mul {size:,}, rows: {num_rows}", copy, 3 * num_rows * size)

    # -- their parts ------------------------------------------------------------------------

    def _case(
        self, name: str, copy: Callable[[], Copy], num_numbers: int, *, num_flop: int = 0
    ) -> Case:
        num_bytes = num_numbers * self.library.dtype.itemsize
        num_copies = min(max(1, math.ceil(self.min_bytes / num_bytes)), _MAX_COPIES)
        copies = tuple(copy() for _ in range(num_copies))
        return Case(name=name, copies=copies, num_bytes=num_bytes, num_flop=num_flop)

    def _call(self, operation: str, args: Structure) -> Callable[[], None]:
        return self.library.record([(operation, args)]).run

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape).to(self.library.dtype)

    def _empty(self, *shape: int) -> Tensor:
        return torch.full(shape, torch.nan, dtype=self.library.dtype)


class _DecodeStep:
    """One token each for the sequences of block tables [num_seqs, num_columns]."""

    def __init__(self, tables: Tensor, context: int) -> None:
        num_seqs = len(tables)
        starts = torch.arange(num_seqs + 1, dtype=torch.int32)
        seq_lens = torch.full((num_seqs,), context, dtype=torch.int32)
        self._kept = (tables, starts, seq_lens)
        self.step = Step(
            num_tokens=num_seqs,
            num_seqs=num_seqs,
            table_stride=tables.stride(0),
            query_start_loc=starts.data_ptr(),
            seq_lens=seq_lens.data_ptr(),
            block_tables=tables.data_ptr(),
        )


def _sdpa(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """query [n, heads, dim], keys and values [n, KV heads, context, dim]. The heads that share a
    KV head stand in the place of query positions, so no key is repeated."""
    grouped = query.view(len(query), NUM_KV_HEADS, -1, HEAD_DIM)
    return F.scaled_dot_product_attention(grouped, keys, values).view(query.shape)


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, _EPS)


def _silu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up
