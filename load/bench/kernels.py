"""`penstock bench kernels`: how near this machine's kernels come to its limits, and to torch.

On a CPU the C kernels, with the rates of memory and of matrix products measured in the same run.
With a GPU the parts of `make gpu-bench` that need no model.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import statistics
import time
from collections.abc import Callable, Sequence
from ctypes import Structure, addressof
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.engine.config import DeviceConfig
from penstock.engine.errors import ConfigError
from penstock.engine.runner.device import select_device
from penstock.kernels.cpu.cores import num_usable_cores
from penstock.kernels.cpu.library import CpuLibrary, load_library
from penstock.kernels.cpu.structures import (
    AttentionArgs,
    LinearArgs,
    RmsNormArgs,
    RopeStoreArgs,
    SiluMulArgs,
    Step,
)
from penstock.load.memory_rate import MemoryReader
from penstock.load.report.options import add_out, counts, positive
from penstock.load.report.tables import publish, table_of

# The C kernels and the same work in torch, on data that no cache holds.
#
# Every case comes in copies, which are used in turn.

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
_EPS = 1e-5
_MAX_COPIES = 64  # of a small operation, whose data come from a cache in use too


@dataclass(frozen=True, slots=True)
class Copy:
    """One of a case's sets of tensors."""

    ours: Callable[[], None]  # runs the C kernel, which leaves its result in `out`
    theirs: Callable[..., Tensor]  # computes the same of `inputs` in torch
    inputs: tuple[Tensor, ...]
    out: Tensor
    kept: tuple[Any, ...]  # what `ours` points to beside them

    def error(self) -> float:
        """‖ours − the same in float64‖ ÷ ‖that‖."""
        self.out.fill_(torch.nan)
        self.ours()
        exact = self.theirs(*(each.double() for each in self.inputs))
        return float((self.out.double() - exact).norm() / exact.norm())


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An operation on one shape."""

    name: str
    copies: tuple[Copy, ...]
    num_bytes: int  # that a call must read and write, each once
    num_flop: int  # of its matrix products


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseMaker:
    """Makes cases for one dtype."""

    library: CpuLibrary
    min_bytes: int  # of all copies of a case together, if so many are not too many

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


# -- the command --------------------------------------------------------------------------------

_MATMUL_SIZE = 2048
_NUM_CEILINGS = 20
_PAUSE_S = 0.01  # the other's threads go on spinning for a while
_MAX_ERROR = 0.02  # ‖ours − float64's‖ ÷ ‖float64's‖ in 16 bits
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_GPU_SECTIONS = "decode_attention,prefill_attention,block_sizes,swap,operations"
_DISTURBED = "Something is faster than the limit: others kept this machine busy, measure again."


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """Of this machine, with the threads that the kernels have."""

    read_bytes_per_s: float
    matmul_flop_per_s: float

    def bound_s(self, case: Case) -> float:
        """Seconds that a case takes at least."""
        return max(case.num_bytes / self.read_bytes_per_s, case.num_flop / self.matmul_flop_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of one call, in medians."""

    name: str
    ours_s: float
    torch_s: float
    bound_s: float
    error: float  # of ours against float64, relative


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--device", default="auto", choices=("auto", "cpu", "cuda"), help="for it")
    add("--dtype", default="bfloat16", choices=tuple(_DTYPES), help="on a CPU")
    add("--num-threads", type=int, default=0, help="CPU threads; 0: one a core")
    add("--rows", type=counts, default="1,8,32,160", help="of linear, with commas")
    add("--features", type=positive, default=2048, help="in; four times as many out")
    add("--context", type=positive, default=1024, help="tokens of each sequence")
    add("--repeats", type=positive, default=9, help="of every case")
    add("--copies-mib", type=positive, default=256, help="of data for a case: more than the caches")
    add_out(parser)


def run(parsed: argparse.Namespace) -> int:
    """Measure on the device there is; print and write the table; 0, or 1 if a kernel is wrong."""
    device = select_device(
        DeviceConfig(device=parsed.device, num_threads=parsed.num_threads or None)
    )
    if device.type == "cuda":
        # transformers, which is a rival there, need not be installed here.
        from penstock.load.gpu.command import main

        return main(["--only", _GPU_SECTIONS, "--out", str(parsed.out)])
    return _run_on_cpu(parsed)


def _run_on_cpu(parsed: argparse.Namespace) -> int:
    library = load_library(_DTYPES[parsed.dtype])
    if library is None:
        raise ConfigError("there are no C kernels to measure: see the line above")
    num_threads = library.start_threads(parsed.num_threads or num_usable_cores())
    torch.set_num_threads(num_threads)
    ceilings = measure_ceilings(library.dtype, num_threads)
    maker = CaseMaker(library=library, min_bytes=parsed.copies_mib << 20)
    costs = [measure(case, ceilings, repeats=parsed.repeats) for case in _cases(maker, parsed)]
    title = f"{parsed.dtype}, {library.isa}, CPU threads: {num_threads}"
    report = f"{title}\n\n{_tables(ceilings, costs)}"
    print(report)
    publish(
        parsed.out,
        "kernels",
        title="CPU kernels",
        report=report,
        data={
            "dtype": parsed.dtype,
            "isa": library.isa,
            "num_threads": num_threads,
            "torch": torch.__version__,
            "ceilings": asdict(ceilings),
            "costs": [asdict(cost) for cost in costs],
        },
    )
    return int(any(not cost.error <= _MAX_ERROR for cost in costs))


def measure_ceilings(dtype: torch.dtype, num_threads: int) -> Ceilings:
    """Rates of reading memory that no cache holds, and of a large matrix product, at best."""
    with MemoryReader(num_threads) as reader:
        read_bytes_per_s = reader.measure(num_passes=_NUM_CEILINGS)
    left, right = (torch.randn(_MATMUL_SIZE, _MATMUL_SIZE).to(dtype) for _ in range(2))
    matmul_s = min(_seconds(lambda: torch.mm(left, right)) for _ in range(_NUM_CEILINGS))
    return Ceilings(
        read_bytes_per_s=read_bytes_per_s, matmul_flop_per_s=2 * _MATMUL_SIZE**3 / matmul_s
    )


def measure(case: Case, ceilings: Ceilings, *, repeats: int) -> Cost:
    """Both implementations over all copies of a case, in turns."""
    error = case.copies[0].error()
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(repeats):
        for calls, seconds in (
            ([copy.ours for copy in case.copies], ours),
            ([partial(copy.theirs, *copy.inputs) for copy in case.copies], theirs),
        ):
            time.sleep(_PAUSE_S)
            seconds.extend(_seconds(call) for call in calls)
    return Cost(
        name=case.name,
        ours_s=statistics.median(ours),
        torch_s=statistics.median(theirs),
        bound_s=ceilings.bound_s(case),
        error=error,
    )


def _cases(maker: CaseMaker, parsed: argparse.Namespace) -> list[Case]:
    features = parsed.features
    return [
        *(maker.linear(rows, features, 4 * features) for rows in parsed.rows),
        *(maker.decode_attention(num_seqs, parsed.context) for num_seqs in (1, 8)),
        *(maker.rms_norm(rows, features) for rows in parsed.rows),
        *(maker.silu_mul(rows, 4 * features) for rows in parsed.rows),
    ]


def _seconds(call: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


# -- what is said of it -----------------------------------------------------------------------


def _tables(ceilings: Ceilings, costs: Sequence[Cost]) -> str:
    shown = table_of(
        costs,
        {
            "kernel": lambda cost: cost.name,
            "µs": lambda cost: f"{1e6 * cost.ours_s:,.1f}",
            "of the limit": lambda cost: f"{cost.bound_s / cost.ours_s:.0%}",
            "torch µs": lambda cost: f"{1e6 * cost.torch_s:,.1f}",
            "speedup": lambda cost: f"{cost.torch_s / cost.ours_s:.2f}",
            "error": lambda cost: f"{cost.error:.1e}",
        },
    )
    parts = [
        f"Memory is read at {ceilings.read_bytes_per_s / 1e9:.1f} GB/s, matrices are "
        f"multiplied at {ceilings.matmul_flop_per_s / 1e9:,.0f} GFLOP/s.",
        shown,
        "The limit: the time to read and write each number once, or to multiply, whichever is "
        "longer. The error is against float64, relative.",
        *([_DISTURBED] if any(cost.bound_s > cost.ours_s for cost in costs) else []),
    ]
    return "\n\n".join(parts)
