"""Finds launch configurations on this GPU: `python3 -m penstock.load.gpu.tune`.

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from penstock.kernels.gpu.tuning import TABLE, Config, Table, device_name
from penstock.load.gpu.bench import (
    DECODE,
    PREFILL,
    PRODUCTS,
    AttentionSizes,
    Bench,
    full_sizes,
    sampling,
    seconds_of,
)
from penstock.load.gpu.command import has_gpu
from penstock.load.gpu.inputs import (
    attend,
    attention_inputs,
    bound_of,
    contiguous,
    multiply,
    quantized_matrix,
    sample,
    sampling_inputs,
    worst_row,
)
from penstock.load.gpu.report import Results, write_whole

_FP8 = torch.float8_e4m3fn
# Of models in use, beside the one that is measured: head_dim, and query heads for each KV head.
_OTHER_HEADS = ((128, 8), (128, 1), (128, 7), (64, 1), (64, 7), (64, 4), (256, 2), (96, 1))
Run = Callable[..., Tensor]  # with `config`, None for the launcher's own choice


@dataclass(frozen=True, slots=True, kw_only=True)
class Tunable:
    """One entry of the table; `runs` are the shapes that judge it, made one after the other."""

    operation: str
    key: str
    candidates: Sequence[Config]
    runs: Callable[[], Iterator[Run]]

    def __str__(self) -> str:
        return f"{self.operation}, {self.key}"


def tunables(bench: Bench) -> Iterator[Tunable]:
    """First what is measured, in every form; then what other models need."""
    measured = bench.sizes.attention
    yield _decode(bench, measured)
    yield _prefill(bench, measured)
    yield _decode(bench, measured, is_contiguous=True)
    yield _decode(bench, measured, is_fp8=True)
    yield _prefill(bench, measured, is_fp8=True)
    for vocab_size in bench.sizes.vocab_sizes:
        yield _sampling(bench, vocab_size)
    for kind, in_bytes in (("int4", False), ("int8", True), ("fp8", False)):
        for rows in PRODUCTS:
            yield _product(bench, kind, rows, in_bytes=in_bytes)
    for block_size in measured.block_sizes:
        if block_size != measured.block_size:
            yield _decode(bench, replace(measured, block_size=block_size))
    for head_dim, group in _OTHER_HEADS:
        num_kv_heads = max(1, measured.num_heads // group)
        sizes = replace(
            measured, head_dim=head_dim, num_heads=group * num_kv_heads, num_kv_heads=num_kv_heads
        )
        yield _decode(bench, sizes)
        yield _prefill(bench, sizes)


# -- attention --------------------------------------------------------------------------------


def _decode(
    bench: Bench, sizes: AttentionSizes, *, is_fp8: bool = False, is_contiguous: bool = False
) -> Tunable:
    """Few and many sequences, short and long: a configuration must suit them all."""
    steps = [
        ([context] * batch, [1] * batch)
        for batch in (max(1, sizes.batches[0] // 8), sizes.batches[-1])
        for context in sizes.contexts[:2]
    ]

    def runs() -> Iterator[Run]:
        for seq_lens, query_lens in steps:
            query, kv = attention_inputs(bench, sizes, seq_lens, query_lens, is_fp8=is_fp8)
            kv = contiguous(kv) if is_contiguous else kv
            yield partial(attend, query, kv, is_contiguous=is_contiguous)

    key = _key(bench, sizes, is_fp8=is_fp8, is_contiguous=is_contiguous)
    return Tunable(operation="paged_decode", key=key, candidates=DECODE, runs=runs)


def _prefill(bench: Bench, sizes: AttentionSizes, *, is_fp8: bool = False) -> Tunable:
    def runs() -> Iterator[Run]:
        for length in sizes.prefills[:2]:
            yield partial(
                attend, *attention_inputs(bench, sizes, [length], [length], is_fp8=is_fp8)
            )

    key = _key(bench, sizes, is_fp8=is_fp8, is_contiguous=False)
    return Tunable(operation="paged_prefill", key=key, candidates=PREFILL, runs=runs)


def _key(bench: Bench, sizes: AttentionSizes, *, is_fp8: bool, is_contiguous: bool) -> str:
    """As the launcher makes it."""
    launcher = importlib.import_module("penstock.kernels.gpu.paged_attention")
    arguments = {
        "HEAD_DIM": sizes.head_dim,
        "GROUP": sizes.num_heads // sizes.num_kv_heads,
        "BLOCK_SIZE": sizes.block_size,
        "IS_CONTIGUOUS": is_contiguous,
    }
    dtype = bench.sizes.dtype
    key: str = launcher.tuning_key(arguments, dtype, _FP8 if is_fp8 else dtype)
    return key


# -- sampling ---------------------------------------------------------------------------------


def _sampling(bench: Bench, vocab_size: int) -> Tunable:
    own: Config = importlib.import_module("penstock.kernels.gpu.sampling").config_for(vocab_size)

    def runs() -> Iterator[Run]:
        for num_rows in (1, bench.sizes.num_sampled):
            yield partial(sample, sampling_inputs(bench, num_rows, vocab_size))

    return Tunable(
        operation="sample_tokens", key=str(vocab_size), candidates=sampling(own), runs=runs
    )


# -- quantized weights ------------------------------------------------------------------------

_NUM_ROWS = {"few": (1, 16), "some": (64,), "many": (256, 2048)}


def _product(bench: Bench, kind: str, rows: str, *, in_bytes: bool) -> Tunable:
    """All of a layer's matrices have one configuration: the widest and the narrowest count."""
    launcher = importlib.import_module("penstock.kernels.gpu.linear_quantized")
    size, wide = (bench.sizes.model[name] for name in ("hidden_size", "intermediate_size"))
    sizes = ((2 * wide, size), (size, size))

    def runs() -> Iterator[Run]:
        for out_features, in_features in sizes:
            matrix = quantized_matrix(bench, kind, out_features, in_features)
            # Otherwise torch would multiply, whatever the configuration.
            matrix = replace(matrix, has_library=False)
            for num_rows in _NUM_ROWS[rows]:
                x = bench.random(num_rows, in_features)
                yield partial(multiply, x, matrix, in_bytes=in_bytes)

    small = quantized_matrix(bench, kind, 64, 64)
    key: str = launcher.tuning_key(small, bench.sizes.dtype, rows, in_bytes=in_bytes)
    return Tunable(operation="linear_quantized", key=key, candidates=PRODUCTS[rows], runs=runs)


# -- the tuner ----------------------------------------------------------------------------------

_MIN_GAIN = 0.02


def main(words: Sequence[str] | None = None) -> int:
    """Tune class after class until the time is up; return 2 without a GPU."""
    parsed = _parser().parse_args(words)
    if not has_gpu():
        return 2
    bench = Bench(device=torch.device("cuda"), sizes=full_sizes(), results=Results(about={}))
    bench.deadline_s = time.perf_counter() + parsed.budget_s
    tune(bench, parsed.table)
    return 0


def tune(
    bench: Bench, path: Path, *, max_classes: int | None = None, max_candidates: int | None = None
) -> None:
    """Write the results for this device into the table at `path`, beside other devices'."""
    table: Table = json.loads(path.read_text("utf-8")) if path.exists() else {}
    for tunable in bench.in_time("tune", islice(tunables(bench), max_classes)):
        config, ratio = best(bench, tunable, tunable.candidates[:max_candidates])
        print(f"    {config} takes {ratio:.3f} of the launcher's choice", flush=True)
        if ratio < 1 - _MIN_GAIN:
            of_device = table.setdefault(device_name() or "interpreter", {})
            of_device.setdefault(tunable.operation, {})[tunable.key] = config
            write_whole(path, json.dumps(table, indent=2, sort_keys=True))


def best(bench: Bench, tunable: Tunable, candidates: Sequence[Config]) -> tuple[Config, float]:
    """The fastest candidate, and its times relative to the launcher's choice."""
    ratios: list[list[float]] = [[] for _ in candidates]
    for run in tunable.runs():
        expected, own_s = run(), bench.timer.median_s(run)
        for config, found in zip(candidates, ratios, strict=True):
            candidate = partial(run, config=config)
            seconds = seconds_of(bench.timer, candidate)
            if seconds < own_s and not _is_same(candidate(), expected):
                print(f"    {config} is wrong", flush=True)
                seconds = math.inf
            found.append(seconds / own_s)
    means = [statistics.geometric_mean(found) for found in ratios]
    place = min(range(len(means)), key=means.__getitem__)
    return candidates[place], means[place]


def _is_same(result: Tensor, expected: Tensor) -> bool:
    """Integers exactly, other numbers up to rounding."""
    if not result.is_floating_point():
        return torch.equal(result, expected)
    return worst_row(result, expected.double()) <= bound_of(result.dtype)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m penstock.load.gpu.tune", description=__doc__)
    add = parser.add_argument
    add("--budget-s", type=float, default=540.0, help="time for all classes")
    add("--table", type=Path, default=TABLE, help="table to read and write")
    return parser


if __name__ == "__main__":
    sys.exit(main())
