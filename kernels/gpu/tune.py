"""Finds launch configurations on this GPU: `python3 -m penstock.kernels.gpu.tune`.

Every candidate runs the shapes of a class. The one with the smallest geometric mean of its
times, relative to the launcher's own choice, is kept if it is faster by more than timing varies
and its results are right. The table is written after each class, so that an interrupted run
keeps its results.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.gpu.measuring import (
    AttentionSizes,
    Draw,
    Timer,
    attend,
    attention_inputs,
    contiguous,
    seconds_of,
)
from penstock.kernels.gpu.quantized import GpuCodes, pack_codes
from penstock.kernels.gpu.tuning import TABLE, Config, Table, device_name, write_whole
from penstock.kernels.gpu_operations import gpu_operation
from penstock.kernels.quantized_codes import QuantizedCodes

_FP8 = torch.float8_e4m3fn
# Of models in use, beside the one that is measured: head_dim, and query heads for each KV head.
_OTHER_HEADS = ((128, 8), (128, 1), (128, 7), (64, 1), (64, 7), (64, 4), (256, 2), (96, 1))
Run = Callable[..., Tensor]  # with `config`, None for the launcher's own choice
# Launch configurations worth trying: each replaces some of what a launcher chooses by itself.
DECODE: tuple[Config, ...] = tuple(
    {"BLOCK_N": block_n, "num_warps": num_warps, "num_stages": num_stages}
    for block_n, num_warps, num_stages in product((32, 64, 128), (2, 4, 8), (2, 3, 4))
)
PREFILL: tuple[Config, ...] = tuple(
    {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": num_warps, "num_stages": num_stages}
    for block_m, block_n, num_warps, num_stages in product((64, 128), (32, 64, 128), (4, 8), (2, 3))
)
# Of a product with quantized weights, by class of rows.
PRODUCTS: Mapping[str, tuple[Config, ...]] = {
    name: tuple(
        {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": num_warps, "num_stages": num_stages}
        for block_n, num_warps, num_stages in product(block_ns, (2, 4, 8), (2, 3, 4, 5))
    )
    for name, block_m, block_ns in (
        ("few", 16, (16, 32, 64)),
        ("some", 64, (32, 64, 128)),
        ("many", 128, (64, 128, 256)),
    )
}


@dataclass(kw_only=True)
class Tuner:
    """A device, and the shapes that are tuned on it: of an 8B Llama first."""

    draw: Draw
    timer: Timer
    attention: AttentionSizes = field(default_factory=AttentionSizes)
    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_sampled: int = 256  # rows of logits
    vocab_sizes: Sequence[int] = (128256, 32000, 151936)
    ends_s: float = math.inf  # by `time.perf_counter`


@dataclass(frozen=True, slots=True, kw_only=True)
class Tunable:
    """One entry of the table; `runs` are the shapes that judge it, made one after the other."""

    operation: str
    key: str
    candidates: Sequence[Config]
    runs: Callable[[], Iterator[Run]]

    def __str__(self) -> str:
        return f"{self.operation}, {self.key}"


def tunables(tuner: Tuner) -> Iterator[Tunable]:
    """First what is measured, in every form; then what other models need."""
    measured = tuner.attention
    yield _decode(tuner, measured)
    yield _prefill(tuner, measured)
    yield _decode(tuner, measured, is_contiguous=True)
    yield _decode(tuner, measured, is_fp8=True)
    yield _prefill(tuner, measured, is_fp8=True)
    for vocab_size in tuner.vocab_sizes:
        yield _sampling(tuner, vocab_size)
    for kind, in_bytes in (("int4", False), ("int8", True), ("fp8", False)):
        for rows in PRODUCTS:
            yield _product(tuner, kind, rows, in_bytes=in_bytes)
    for block_size in measured.block_sizes:
        if block_size != measured.block_size:
            yield _decode(tuner, replace(measured, block_size=block_size))
    for head_dim, group in _OTHER_HEADS:
        num_kv_heads = max(1, measured.num_heads // group)
        sizes = replace(
            measured, head_dim=head_dim, num_heads=group * num_kv_heads, num_kv_heads=num_kv_heads
        )
        yield _decode(tuner, sizes)
        yield _prefill(tuner, sizes)


# -- attention --------------------------------------------------------------------------------


def _decode(
    tuner: Tuner, sizes: AttentionSizes, *, is_fp8: bool = False, is_contiguous: bool = False
) -> Tunable:
    """Few and many sequences, short and long: a configuration must suit them all."""
    steps = [
        ([context] * batch, [1] * batch)
        for batch in (max(1, sizes.batches[0] // 8), sizes.batches[-1])
        for context in sizes.contexts[:2]
    ]

    def runs() -> Iterator[Run]:
        for seq_lens, query_lens in steps:
            query, kv = attention_inputs(tuner.draw, sizes, seq_lens, query_lens, is_fp8=is_fp8)
            kv = contiguous(kv) if is_contiguous else kv
            yield partial(attend, query, kv, is_contiguous=is_contiguous)

    key = _key(tuner, sizes, is_fp8=is_fp8, is_contiguous=is_contiguous)
    return Tunable(operation="paged_decode", key=key, candidates=DECODE, runs=runs)


def _prefill(tuner: Tuner, sizes: AttentionSizes, *, is_fp8: bool = False) -> Tunable:
    def runs() -> Iterator[Run]:
        for length in sizes.prefills[:2]:
            yield partial(
                attend, *attention_inputs(tuner.draw, sizes, [length], [length], is_fp8=is_fp8)
            )

    key = _key(tuner, sizes, is_fp8=is_fp8, is_contiguous=False)
    return Tunable(operation="paged_prefill", key=key, candidates=PREFILL, runs=runs)


def _key(tuner: Tuner, sizes: AttentionSizes, *, is_fp8: bool, is_contiguous: bool) -> str:
    """The key of the table under which the launcher will look for these sizes."""
    launcher = importlib.import_module("penstock.kernels.gpu.paged_attention")
    arguments = {
        "HEAD_DIM": sizes.head_dim,
        "GROUP": sizes.num_heads // sizes.num_kv_heads,
        "BLOCK_SIZE": sizes.block_size,
        "IS_CONTIGUOUS": is_contiguous,
    }
    dtype = tuner.draw.dtype
    key: str = launcher.tuning_key(arguments, dtype, _FP8 if is_fp8 else dtype)
    return key


# -- sampling ---------------------------------------------------------------------------------

_TEMPERATURE, _TOP_P = 0.8, 0.95
_SPREAD = 3.0  # standard deviation of logits, about as models have it


def _sampling(tuner: Tuner, vocab_size: int) -> Tunable:
    """Variations of the launcher's own choice for a vocabulary."""
    own: Config = importlib.import_module("penstock.kernels.gpu.sampling").config_for(vocab_size)
    candidates = tuple(
        {**own, "BLOCK": block, "num_warps": num_warps}
        for block, num_warps in product((1024, 2048, 4096, 8192), (4, 8, 16))
    )
    operation = gpu_operation("sample_tokens", "sampling")

    def sample(inputs: tuple[Tensor, ...], **options: Any) -> Tensor:
        token_ids: Tensor = operation(*inputs, **options)[0]
        return token_ids

    def runs() -> Iterator[Run]:
        for num_rows in (1, tuner.num_sampled):
            none = torch.zeros(num_rows, dtype=torch.float64, device=tuner.draw.device)
            logits = _SPREAD * tuner.draw.random(num_rows, vocab_size)
            uniforms = tuner.draw.random(num_rows, dtype=torch.float64).abs() % 1
            # Without top_k and min_p.
            inputs = (logits, none + _TEMPERATURE, none, none + _TOP_P, none, uniforms)
            yield partial(sample, inputs)

    return Tunable(operation="sample_tokens", key=str(vocab_size), candidates=candidates, runs=runs)


# -- quantized weights ------------------------------------------------------------------------

_NUM_ROWS = {"few": (1, 16), "some": (64,), "many": (256, 2048)}
_BLOCK = 128  # columns of a scale, but for fp8: it has one for each row


def quantized_matrix(tuner: Tuner, kind: str, out_features: int, in_features: int) -> GpuCodes:
    """Random codes of int4, int8 or fp8, and scales that make numbers around 1."""
    values = tuner.draw.random(out_features, in_features)
    block = in_features if kind == "fp8" else _BLOCK
    scales = (
        tuner.draw.random(out_features, -(-in_features // block), dtype=torch.float32).abs() + 0.5
    )
    bits = 4 if kind == "int4" else 8
    if kind == "fp8":
        codes = values.to(_FP8).view(torch.uint8)
    else:
        zero, spread = 1 << (bits - 1), 1 << (bits - 3)
        codes = (values.float() * spread + zero).round().clamp(0, 2 * zero - 1).to(torch.uint8)
        scales /= spread
    matrix = QuantizedCodes(
        codes=codes, bits=bits, scales=scales, columns_per_scale=block,
        zero=0 if kind == "fp8" else zero, is_float8=kind == "fp8",
    )  # fmt: skip
    return pack_codes(matrix, values)


def _product(tuner: Tuner, kind: str, rows: str, *, in_bytes: bool) -> Tunable:
    """All of a layer's matrices have one configuration: the widest and the narrowest count."""
    launcher = importlib.import_module("penstock.kernels.gpu.linear_quantized")
    size, wide = tuner.hidden_size, tuner.intermediate_size
    sizes, multiply = ((2 * wide, size), (size, size)), gpu_operation("linear_quantized")

    def runs() -> Iterator[Run]:
        for out_features, in_features in sizes:
            matrix = quantized_matrix(tuner, kind, out_features, in_features)
            # Otherwise torch would multiply, whatever the configuration.
            matrix = replace(matrix, has_library=False)
            for num_rows in _NUM_ROWS[rows]:
                x = tuner.draw.random(num_rows, in_features)
                yield partial(multiply, x, matrix, in_bytes=in_bytes)

    small = quantized_matrix(tuner, kind, 64, 64)
    key: str = launcher.tuning_key(small, tuner.draw.dtype, rows, in_bytes=in_bytes)
    return Tunable(operation="linear_quantized", key=key, candidates=PRODUCTS[rows], runs=runs)


# -- the tuner ----------------------------------------------------------------------------------

_MIN_GAIN = 0.02


def main(words: Sequence[str] | None = None) -> int:
    """Tune class after class until the time is up; return 2 without a GPU."""
    parser = argparse.ArgumentParser(
        prog="python -m penstock.kernels.gpu.tune", description=__doc__
    )
    parser.add_argument("--budget-s", type=float, default=540.0, help="time for all classes")
    parser.add_argument("--table", type=Path, default=TABLE, help="table to read and write")
    parsed = parser.parse_args(words)
    if not torch.cuda.is_available():
        print("penstock: error: torch finds no GPU here", file=sys.stderr)
        return 2
    device = torch.device("cuda")
    tuner = Tuner(
        draw=Draw(device, torch.bfloat16),
        timer=Timer(device, flush_bytes=1 << 30, num_repeats=30),
        ends_s=time.perf_counter() + parsed.budget_s,
    )
    tune(tuner, parsed.table)
    return 0


def tune(
    tuner: Tuner, path: Path, *, max_classes: int | None = None, max_candidates: int | None = None
) -> None:
    """Write the results for this device into the table at `path`, beside other devices'."""
    table: Table = json.loads(path.read_text("utf-8")) if path.exists() else {}
    for tunable in islice(tunables(tuner), max_classes):
        if time.perf_counter() > tuner.ends_s:
            print(f"no time left for {tunable} and what comes after it", flush=True)
            break
        print(f"  {tunable}", flush=True)
        config, ratio = best(tuner, tunable, tunable.candidates[:max_candidates])
        print(f"    {config} takes {ratio:.3f} of the launcher's choice", flush=True)
        if ratio < 1 - _MIN_GAIN:
            of_device = table.setdefault(device_name() or "interpreter", {})
            of_device.setdefault(tunable.operation, {})[tunable.key] = config
            write_whole(path, json.dumps(table, indent=2, sort_keys=True))


def best(tuner: Tuner, tunable: Tunable, candidates: Sequence[Config]) -> tuple[Config, float]:
    """The fastest candidate, and its times relative to the launcher's choice."""
    ratios: list[list[float]] = [[] for _ in candidates]
    for run in tunable.runs():
        expected, own_s = run(), tuner.timer.median_s(run)
        for config, found in zip(candidates, ratios, strict=True):
            candidate = partial(run, config=config)
            seconds = seconds_of(tuner.timer, candidate)
            if seconds < own_s and not _is_same(candidate(), expected):
                print(f"    {config} is wrong", flush=True)
                seconds = math.inf
            found.append(seconds / own_s)
    means = [statistics.geometric_mean(found) for found in ratios]
    place = min(range(len(means)), key=means.__getitem__)
    return candidates[place], means[place]


def _is_same(result: Tensor, expected: Tensor) -> bool:
    """Integers exactly, other numbers up to rounding: they are rounded a few times on their way."""
    if not result.is_floating_point():
        return torch.equal(result, expected)
    exact = expected.double()
    errors = (result.double() - exact).norm(dim=-1) / exact.norm(dim=-1)
    return float(errors.max()) <= 2 * torch.finfo(result.dtype).eps


if __name__ == "__main__":
    sys.exit(main())
