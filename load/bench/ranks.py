"""`penstock bench ranks`: a model on several ranks beside the same threads in one, on the CPU.

In turns, the same streams decode in an engine of N threads, in one of N ranks with a thread each
that share its matrices, and in one of N such stages; each has a process of its own, and rests while
another runs. A figure is the median of the ratios of neighbouring runs. And what a sum over the
ranks takes: one row of a decoding step.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from ctypes import c_int64
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import torch

from penstock.engine.config import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
)
from penstock.engine.parallel.ranks import SharedRanks
from penstock.engine.startup import build_core
from penstock.kernels.cpu.library import load_library
from penstock.kernels.cpu.program import Program
from penstock.load.engine_runs import Lengths, make_requests, run_requests
from penstock.load.machine import commit, frozen_garbage
from penstock.load.peers.report import machine
from penstock.load.report.options import add_out, counts, positive
from penstock.load.report.tables import publish, table_of

_KV_BYTES = 256 << 20
_MIN_RATIO, _MAX_SUM_US = 0.85, 20.0
_SUM_SIZES = (896, 2048, 4096)
_NUM_SUMS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One number of streams; ratios are those to one rank with as many threads, run by run."""

    num_seqs: int
    one_rank_tokens_per_s: float
    tokens_per_s: float
    ratio: float
    ratios: Sequence[float]
    stages_tokens_per_s: float
    stages_ratio: float
    stages_ratios: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class SumFigures:
    """A sum of one float32 row, in microseconds from call to return."""

    size: int
    median_us: float
    percentile_90_us: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="demo", help="a directory, a Hub id, or demo")
    add("--dtype", default="auto", help="as for `penstock serve`")
    add("--quantization", default="none", help="as for `penstock serve`")
    add("--num-ranks", type=positive, default=2, help="ranks, and threads of the one beside them")
    add("--num-seqs", type=counts, default="1,8,32", help="numbers of streams, comma-separated")
    add("--prompt-tokens", type=positive, default=32, help="tokens of a prompt")
    add("--output-tokens", type=positive, default=64, help="tokens of an output")
    add("--repeats", type=positive, default=7, help="timed rounds")
    add_out(parser)


def run(parsed: argparse.Namespace) -> int:
    """Measure both; print and write the tables."""
    sums = measure_sums(parsed.num_ranks, num_sums=_NUM_SUMS)
    found = _measure_decoding(parsed)
    decoding = table_of(
        found,
        {
            "streams": lambda each: str(each.num_seqs),
            "tok/s, one rank": lambda each: f"{each.one_rank_tokens_per_s:.1f}",
            f"tok/s, {parsed.num_ranks} ranks": lambda each: f"{each.tokens_per_s:.1f}",
            "ratio": lambda each: f"{each.ratio:.3f}",
            "bar": lambda each: _verdict(each.ratio >= _MIN_RATIO, f"≥ {_MIN_RATIO}"),
            f"tok/s, {parsed.num_ranks} stages": lambda each: f"{each.stages_tokens_per_s:.1f}",
            "stages' ratio": lambda each: f"{each.stages_ratio:.3f}",
        },
    )
    times = table_of(
        sums,
        {
            "sum of a row of": lambda each: f"{each.size:,}",
            "median µs": lambda each: f"{each.median_us:.2f}",
            "90 % µs": lambda each: f"{each.percentile_90_us:.2f}",
            "bar": lambda each: _verdict(each.median_us <= _MAX_SUM_US, f"≤ {_MAX_SUM_US:.0f}"),
        },
    )
    where, at_commit = machine(), commit()
    title = f"{parsed.num_ranks} ranks or stages of one thread beside one of {parsed.num_ranks}"
    made = f"{where['cpu']}, {where['cores']} cores, commit {at_commit}, {Path(parsed.model).name}"
    settings = ("model", "dtype", "quantization", "num_ranks", "prompt_tokens", "output_tokens")
    data = {
        "machine": where,
        "commit": at_commit,
        **{name: getattr(parsed, name) for name in settings},
        "decoding": [asdict(each) for each in found],
        "sums": [asdict(each) for each in sums],
    }
    publish(parsed.out, "ranks", title, f"{made}\n\n{decoding}\n\n{times}", data)
    return 0


def _verdict(is_held: bool, bar: str) -> str:
    return f"{'held' if is_held else 'missed'} ({bar})"


def measure_sums(num_ranks: int, *, num_sums: int) -> list[SumFigures]:
    """Of all ranks together, without work between the sums; empty without a compiler."""
    if load_library(torch.float32) is None:
        return []
    fd = os.memfd_create("penstock-bench")
    context = multiprocessing.get_context("fork")  # no threads are there yet
    others = [
        context.Process(target=_sum_rows, args=(rank, num_ranks, fd, num_sums), daemon=True)
        for rank in range(1, num_ranks)
    ]
    for other in others:
        other.start()
    times = _sum_rows(0, num_ranks, fd, num_sums)
    for other in others:
        other.join()
    os.close(fd)
    return [
        SumFigures(
            size=size,
            median_us=statistics.median(each) * 1e6,
            percentile_90_us=statistics.quantiles(each, n=10)[-1] * 1e6,
        )
        for size, each in times.items()
    ]


def _sum_rows(rank: int, num_ranks: int, fd: int, num_sums: int) -> dict[int, list[float]]:
    """A rank's sums: seconds of each, by the size of a row."""
    ranks = SharedRanks(rank=rank, size=num_ranks, fd=fd, store="")
    library = load_library(torch.float32)
    assert library is not None
    times: dict[int, list[float]] = {}
    for size in _SUM_SIZES:
        y, num_rows, structure = torch.empty(1, size), c_int64(1), ranks.structure(library)
        programs = []
        for _ in range(2):  # in turns, as in a model
            parts = ranks.memory.region(num_ranks * size * 4).view(torch.float32)
            programs.append(Program(library))
            programs[-1].add(
                "sum_ranks", y=y, parts=parts, ranks=structure, num_rows=num_rows, size=size,
                part_stride=size,
            )  # fmt: skip
            programs[-1].record()
        ranks.minimum(0)
        for number in range(num_sums):
            start_s = time.perf_counter()
            programs[number % 2].run(is_shared=False)
            times.setdefault(size, []).append(time.perf_counter() - start_s)
    return times


def _measure_decoding(parsed: argparse.Namespace) -> list[Figures]:
    rates: dict[int, list[tuple[float, ...]]] = {each: [] for each in parsed.num_seqs}
    with ExitStack() as stack:
        measure = [
            stack.enter_context(_Engine(parsed, num_ranks=num_ranks, num_stages=num_stages))
            for num_ranks, num_stages in ((1, 1), (parsed.num_ranks, 1), (1, parsed.num_ranks))
        ]
        for number in range(parsed.repeats + 1):
            for num_seqs, found in rates.items():
                run = tuple(engine.rate(num_seqs) for engine in measure)
                if number:  # the first warms up
                    found.append(run)
    return [_figures(num_seqs, runs) for num_seqs, runs in rates.items()]


def _figures(num_seqs: int, runs: Sequence[tuple[float, ...]]) -> Figures:
    one, ranks, stages = map(statistics.median, zip(*runs, strict=True))
    ratios, stages_ratios = ([run[place] / run[0] for run in runs] for place in (1, 2))
    return Figures(
        num_seqs=num_seqs,
        one_rank_tokens_per_s=one,
        tokens_per_s=ranks,
        ratio=statistics.median(ratios),
        ratios=ratios,
        stages_tokens_per_s=stages,
        stages_ratio=statistics.median(stages_ratios),
        stages_ratios=stages_ratios,
    )


class _Engine:
    """An engine in a process of its own, since a pool of threads never shrinks."""

    def __init__(self, parsed: argparse.Namespace, *, num_ranks: int, num_stages: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, self._other = context.Pipe()
        given = (self._other, vars(parsed), num_ranks, num_stages)
        self._process = context.Process(target=_serve, args=given)

    def __enter__(self) -> _Engine:
        self._process.start()
        self._other.close()  # so that its end is seen
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(BrokenPipeError):
            self._pipe.send(None)
        self._process.join()
        self._pipe.close()

    def rate(self, num_seqs: int) -> float:
        """Tokens per second while it decodes so many streams."""
        self._pipe.send(num_seqs)
        return cast("float", self._pipe.recv())


def _serve(pipe: Connection, given: dict[str, Any], num_ranks: int, num_stages: int) -> None:
    num_threads = given["num_ranks"] // (num_ranks * num_stages)
    lengths = Lengths(prompt_tokens=given["prompt_tokens"], output_tokens=given["output_tokens"])
    core, _ = build_core(
        EngineConfig(
            model=ModelConfig(
                model=given["model"], dtype=given["dtype"], quantization=given["quantization"]
            ),
            cache=CacheConfig(
                kv_cache_memory_bytes=_KV_BYTES, enable_prefix_caching=False, swap_space=0
            ),
            scheduler=SchedulerConfig(),
            device=DeviceConfig(
                device="cpu",
                num_threads=num_threads,
                tensor_parallel_size=num_ranks,
                pipeline_parallel_size=num_stages,
            ),
        )
    )
    receive: Callable[[], int | None] = pipe.recv
    with closing(core), frozen_garbage():
        while (num_seqs := receive()) is not None:
            rng = random.Random(num_seqs)
            requests = make_requests(num_seqs, lengths, vocab_size=1000, rng=rng)
            pipe.send(run_requests(core, requests, lengths).decode_tokens_per_s)
