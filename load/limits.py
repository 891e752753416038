"""What limits a model on this machine's CPU: the rates of reading memory and of multiplying.

A product is one multiplication and its addition. Machines drift, so both rates are measured beside
what is compared with them.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from penstock.engine.config import Quantization
from penstock.engine.models.registry import read_model_config
from penstock.engine.protocol.messages import EngineInfo
from penstock.kernels.cpu.library import CpuLibrary
from penstock.kernels.cpu.program import CpuProgram
from penstock.kernels.cpu.quantized import PackedCodes
from penstock.kernels.cpu.weight_memory import WeightMemory
from penstock.kernels.quantized_codes import QuantizedCodes

# A quantized matrix of which each core's L2 cache holds its part.
_NUM_ROWS, _IN_FEATURES, _OUT_FEATURES = 256, 1024, 768
_PART_BYTES, _TILE_IN = 256 << 10, 128  # as in limits.inc.c


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """The machine's limits, with the kernels' threads."""

    read_bytes_per_s: float = 0.0
    products_per_s: float = 0.0

    @classmethod
    def of(
        cls,
        library: CpuLibrary,
        num_bytes: int,
        kind: Quantization = "none",
        *,
        in_bytes: bool = False,
    ) -> Self:
        """The rates of now, where so much memory is read again and again."""
        read = read_bytes_per_s(library, num_bytes)
        products = products_per_s(library, kind, in_bytes=in_bytes)
        return cls(read_bytes_per_s=read, products_per_s=products)

    def bound_s(self, num_bytes: float, num_products: float) -> float:
        """The least time in which this can be read and multiplied."""
        return max(num_bytes / self.read_bytes_per_s, num_products / self.products_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadWeights:
    """The matrices that a step of one token reads: all but an embedding that is not the head, and
    of a layer's experts those of a token. Norms and biases are too few to count."""

    num_in_layers: int  # each multiplies every token
    num_in_head: int  # each multiplies a token after which one is drawn
    num_bytes: int

    @classmethod
    def of(cls, info: EngineInfo) -> Self:
        _, config = read_model_config(Path(info.model_path))
        itemsize: int = getattr(torch, info.dtype).itemsize
        query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        attention = config.num_layers * config.hidden_size * (2 * query + 2 * kv)
        read, held = (
            attention + config.num_mlp_weights(is_read=is_read) for is_read in (True, False)
        )
        head = config.vocab_size * config.hidden_size
        num_bytes = (read + head) * itemsize
        if info.quantization != "none":
            num_tables = 1 if config.is_tied else 2
            num_bytes = info.weight_bytes * (read + head) // (held + num_tables * head)
        return cls(num_in_layers=read, num_in_head=head, num_bytes=num_bytes)


def products_per_s(
    library: CpuLibrary, kind: Quantization, *, in_bytes: bool, num_passes: int = 100
) -> float:
    """The rate of the kernels' instructions, of the best pass: dense, those of a tile whose numbers
    are in the nearest cache; quantized, the product of a small matrix with one scale in a row.

    Args:
        in_bytes: a quantized matrix multiplies rows that were rounded to bytes before, where its
            kernel can.
    """
    num_products, program = ctypes.c_int64(), CpuProgram(library)
    if kind == "none":
        x, weights = (torch.randn(size, _TILE_IN).to(library.dtype) for size in (32, 48))
        sums = torch.empty(8 * library.num_threads)
        program.add(
            "multiply_tiles", num_products=num_products, sums=sums, x=x, weights=weights,
            num_items=len(sums), num_repeats=200,
        )  # fmt: skip
    else:
        codes = random_codes(kind, _OUT_FEATURES, _IN_FEATURES, columns_per_scale=_IN_FEATURES)
        given: dict[str, Any] = {
            "num_rows": ctypes.c_int64(_NUM_ROWS),
            "x": torch.randn(_NUM_ROWS, _IN_FEATURES).to(library.dtype),
            "y": torch.empty(_NUM_ROWS, _OUT_FEATURES, dtype=library.dtype),
        }
        in_bytes = in_bytes and not codes.is_float8
        if in_bytes:
            given["x"] = torch.randint(256, (_NUM_ROWS, _IN_FEATURES), dtype=torch.uint8)
            given["x_scales"] = torch.ones(_NUM_ROWS, 1)
            given["x_sums"] = torch.zeros(_NUM_ROWS, 1, dtype=torch.int32)
        packed = PackedCodes(library, codes, in_bytes=in_bytes)
        program.add("linear_quantized", **packed.arguments(), **given)
        num_products.value = _NUM_ROWS * _IN_FEATURES * _OUT_FEATURES
    program.record()
    program.run()  # wakes the threads
    best_s = min(duration_s(program.run) for _ in range(num_passes))
    library.settle()  # a late thread may still read the matrix
    return num_products.value / best_s


def random_codes(
    kind: Quantization, out_features: int, in_features: int, *, columns_per_scale: int
) -> QuantizedCodes:
    """A matrix of a quantized kind, with scales of 1."""
    bits, is_float8 = 4 if kind == "int4" else 8, kind == "fp8"
    codes = torch.randint(1 << bits, (out_features, in_features), dtype=torch.uint8)
    if is_float8:
        codes &= 0xBF  # numbers below 2, none of them NaN
    return QuantizedCodes(
        codes=codes,
        bits=bits,
        scales=torch.ones(out_features, -(-in_features // columns_per_scale)),
        columns_per_scale=columns_per_scale,
        zero=0 if is_float8 else 1 << bits - 1,
        is_float8=is_float8,
    )


def duration_s(call: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


def read_bytes_per_s(library: CpuLibrary, num_bytes: int, *, num_passes: int = 10) -> float:
    """The best of some passes over so much memory, by the kernels' threads: each reads a contiguous
    part of it as it reads weights, of which a cache may hold as many as of these."""
    sums = torch.zeros(-(-num_bytes // _PART_BYTES), dtype=torch.int64)
    words = WeightMemory().allocate(len(sums) * _PART_BYTES).view(torch.int32)
    words.fill_(1)  # a page exists from its first write on
    program = CpuProgram(library)
    program.add("read_words", sums=sums, words=words, num_bytes=words.nbytes)
    program.record()
    program.run()  # wakes the threads
    best_s = min(duration_s(program.run) for _ in range(num_passes))
    library.settle()
    assert int(sums.sum()) == words.numel(), "not all of it was read"
    return words.nbytes / best_s
