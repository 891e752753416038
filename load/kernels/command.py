"""`penstock bench kernels`: the C kernels' times compared with this CPU's limits and with torch.

The rates of memory and of matrix products are measured in the same run. `make gpu-bench` measures
the kernels of a GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.engine.config import KV_CACHE_DTYPES, QUANTIZATIONS, KVCacheDType, Quantization
from penstock.engine.errors import ConfigError
from penstock.kernels.cpu.cores import num_usable_cores
from penstock.kernels.cpu.library import CpuLibrary, load_library
from penstock.kernels.cpu.program import CpuProgram
from penstock.kernels.cpu.quantized import PackedCodes
from penstock.kernels.int8_cache import SCALE_BYTES
from penstock.load.limits import Ceilings, duration_s, random_codes
from penstock.load.report.options import add_out, counts, positive
from penstock.load.report.tables import publish, table_of

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
# None: the library's own.
_STORED: Mapping[KVCacheDType, torch.dtype | None] = {
    "auto": None, "fp8": torch.float8_e4m3fn, "int8": torch.int8
}  # fmt: skip
_COLUMNS_PER_SCALE = 64
_MAX_COPIES = 64  # of a small operation, whose data are cached in real use too


class Copy(NamedTuple):
    """One of a case's sets of tensors."""

    ours: Callable[[], object]  # runs the C kernel
    theirs: Callable[[], object]  # the same in torch
    kept: tuple[object, ...]  # what `ours` points to


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An operation on one shape; its copies are used in turn, so that no cache holds the data."""

    name: str
    copies: Sequence[Copy]
    num_bytes: int  # that a call must read and write, each once
    num_products: int  # multiplications, each with its addition


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseMaker:
    """Makes cases for one dtype. What is in the tensors does not matter: the tests of the kernels
    compare their results."""

    library: CpuLibrary
    min_bytes: int  # of all copies of a case together, up to _MAX_COPIES

    def linear(
        self, num_rows: int, in_features: int, out_features: int, *, kind: Quantization = "none"
    ) -> Case:
        """Rows by a weight, as between any two layers; a quantized one by rows as they are."""
        weight, codes = self._random(out_features, in_features), None
        if kind != "none":
            block = _COLUMNS_PER_SCALE
            codes = random_codes(kind, out_features, in_features, columns_per_scale=block)

        def copy() -> Copy:
            x, y = self._random(num_rows, in_features), self._random(num_rows, out_features)
            given = {"num_rows": ctypes.c_int64(num_rows), "x": x, "y": y}
            if codes is not None:
                packed: Any = PackedCodes(self.library, codes, in_bytes=False)
                ours = self._call("linear_quantized", **given, **packed.arguments())
            else:
                packed = self.library.pack(weight)
                sizes = {"in_features": in_features, "out_features": out_features}
                ours = self._call("linear", weight=packed, **given, **sizes)
            return Copy(ours, partial(F.linear, x, weight.clone()), (packed,))

        num_moved = num_rows * (in_features + out_features) * weight.itemsize
        num_moved += weight.nbytes if codes is None else codes.nbytes
        what = "linear" if kind == "none" else f"linear {kind}"
        name = f"{what} {in_features:,} → {out_features:,}, rows: {num_rows}"
        return self._case(name, copy, num_moved, num_rows * in_features * out_features)

    def decode_attention(
        self, num_seqs: int, context: int, *, kv_cache_dtype: KVCacheDType = "auto"
    ) -> Case:
        """One query token of each sequence over its KV: ours through random block tables, torch's
        SDPA over contiguous KV in the library's dtype."""
        stored = _STORED[kv_cache_dtype] or self.library.dtype
        head_size = HEAD_DIM + (SCALE_BYTES if stored == torch.int8 else 0)

        def copy() -> Copy:
            query = self._random(num_seqs, NUM_HEADS, HEAD_DIM)
            keys, values = (
                self._random(num_seqs, NUM_KV_HEADS, context, HEAD_DIM) for _ in range(2)
            )
            tables = torch.randperm(num_seqs * -(-context // BLOCK_SIZE)).to(torch.int32)
            tables = tables.view(num_seqs, -1)
            shape = (tables.numel(), BLOCK_SIZE, NUM_KV_HEADS, head_size)
            caches = [torch.zeros(shape, dtype=stored) for _ in "kv"]
            ones = torch.ones(NUM_KV_HEADS)
            is_fp8 = stored == torch.float8_e4m3fn
            scales = {"key_scales": ones, "value_scales": ones} if is_fp8 else {}
            starts = torch.arange(num_seqs + 1, dtype=torch.int32)
            seq_lens = torch.full((num_seqs,), context, dtype=torch.int32)
            step = self.library.structure(
                "step", num_tokens=num_seqs, num_seqs=num_seqs, table_stride=tables.stride(0),
                query_start_loc=starts, seq_lens=seq_lens, block_tables=tables,
            )  # fmt: skip
            ours = self._call(
                "attention", out=torch.empty_like(query), query=query, key_cache=caches[0],
                value_cache=caches[1], step=step, num_heads=NUM_HEADS, num_kv_heads=NUM_KV_HEADS,
                head_dim=HEAD_DIM, scale=HEAD_DIM**-0.5, block_size=BLOCK_SIZE,
                is_int8=stored == torch.int8, **scales,
            )  # fmt: skip
            return Copy(ours, partial(_sdpa, query, keys, values), (tables, starts, seq_lens))

        kv_bytes = context * NUM_KV_HEADS * head_size * stored.itemsize
        num_bytes = 2 * num_seqs * (NUM_HEADS * HEAD_DIM * self.library.dtype.itemsize + kv_bytes)
        name = f"decode attention, sequences: {num_seqs}, context {context:,}"
        if kv_cache_dtype != "auto":
            name += f", {kv_cache_dtype} KV"
        return self._case(name, copy, num_bytes, 2 * num_seqs * NUM_HEADS * HEAD_DIM * context)

    def _case(self, name: str, copy: Callable[[], Copy], num_bytes: int, num_products: int) -> Case:
        num_copies = min(max(1, math.ceil(self.min_bytes / num_bytes)), _MAX_COPIES)
        copies = [copy() for _ in range(num_copies)]
        return Case(name=name, copies=copies, num_bytes=num_bytes, num_products=num_products)

    def _call(self, operation: str, **arguments: Any) -> Callable[[], None]:
        program = CpuProgram(self.library)
        program.add(operation, **arguments)
        program.record()
        return program.run

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape).to(self.library.dtype)


def _sdpa(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """query [n, heads, dim], keys and values [n, KV heads, context, dim]. The heads of a KV head
    are passed as query positions, so no key is repeated."""
    grouped = query.view(len(query), NUM_KV_HEADS, -1, HEAD_DIM)
    return F.scaled_dot_product_attention(grouped, keys, values).view(query.shape)


# -- the command --------------------------------------------------------------------------------

_PAUSE_S = 0.01  # until the threads of the other implementation stop spinning
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
Row = Mapping[str, Any]
_DISTURBED = "A kernel is faster than the limit: the machine was busy, so measure again."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--dtype", default="bfloat16", choices=tuple(_DTYPES), help="element type")
    add("--num-threads", type=int, default=0, help="CPU threads; 0: one a core")
    add("--rows", type=counts, default="1,8,32,160", help="rows of linear, comma-separated")
    add("--features", type=positive, default=2048, help="input features; outputs: 4 times as many")
    add("--context", type=positive, default=1024, help="tokens per sequence")
    add("--repeats", type=positive, default=9, help="runs of every case")
    add("--copies-mib", type=positive, default=256, help="data per case; more than the caches hold")
    add_out(parser)


def run(parsed: argparse.Namespace) -> int:
    """Measure; print and write the tables."""
    library = load_library(_DTYPES[parsed.dtype])
    if library is None:
        raise ConfigError("no C kernels to measure: see the line above")
    num_threads = library.start_threads(parsed.num_threads or num_usable_cores())
    torch.set_num_threads(num_threads)
    ceilings = Ceilings.of(library, parsed.copies_mib << 20)
    maker = CaseMaker(library=library, min_bytes=parsed.copies_mib << 20)
    costs = [measure(case, ceilings, repeats=parsed.repeats) for case in _cases(maker, parsed)]
    title = f"{parsed.dtype}, {library.isa}, CPU threads: {num_threads}"
    data = {
        "dtype": parsed.dtype,
        "isa": library.isa,
        "num_threads": num_threads,
        "torch": torch.__version__,
        "ceilings": asdict(ceilings),
        "costs": costs,
    }
    publish(parsed.out, "kernels", "CPU kernels", f"{title}\n\n{_tables(ceilings, costs)}", data)
    return 0


def measure(case: Case, ceilings: Ceilings, *, repeats: int) -> Row:
    """Time both implementations in turn, each over all copies of a case: medians of one call."""
    ours: list[float] = []
    theirs: list[float] = []
    for copy in case.copies[:1]:  # the first call is slow
        copy.ours()
        copy.theirs()
    for _ in range(repeats):
        for name, seconds in (("ours", ours), ("theirs", theirs)):
            time.sleep(_PAUSE_S)
            seconds.extend(duration_s(getattr(copy, name)) for copy in case.copies)
    return {
        "name": case.name,
        "ours_s": statistics.median(ours),
        "torch_s": statistics.median(theirs),
        "bound_s": ceilings.bound_s(case.num_bytes, case.num_products),
    }


def _cases(maker: CaseMaker, parsed: argparse.Namespace) -> list[Case]:
    features = parsed.features
    return [
        *(
            maker.linear(rows, features, 4 * features, kind=kind)
            for kind, rows in product(QUANTIZATIONS, parsed.rows)
        ),
        *(
            maker.decode_attention(num_seqs, parsed.context, kv_cache_dtype=kind)
            for num_seqs, kind in product((1, 8), KV_CACHE_DTYPES)
        ),
    ]


# -- what is said of it -----------------------------------------------------------------------


def _tables(ceilings: Ceilings, costs: Sequence[Row]) -> str:
    shown = table_of(
        costs,
        {
            "kernel": lambda cost: cost["name"],
            "µs": lambda cost: f"{1e6 * cost['ours_s']:,.1f}",
            "of the limit": lambda cost: f"{cost['bound_s'] / cost['ours_s']:.0%}",
            "torch µs": lambda cost: f"{1e6 * cost['torch_s']:,.1f}",
            "speedup": lambda cost: f"{cost['torch_s'] / cost['ours_s']:.2f}",
        },
    )
    parts = [
        f"Memory is read at {ceilings.read_bytes_per_s / 1e9:.1f} GB/s, matrices are "
        f"multiplied at {2 * ceilings.products_per_s / 1e9:,.0f} GFLOP/s.",
        shown,
        "The limit: the time to read and write each number once, or to multiply, whichever is "
        "longer.",
        *([_DISTURBED] if any(cost["bound_s"] > cost["ours_s"] for cost in costs) else []),
    ]
    return "\n\n".join(parts)
