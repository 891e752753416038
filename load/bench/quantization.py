"""`penstock bench quantization`: the speed of quantized weights beside that of the own dtype.

It measures the engine's tokens per second on the CPU, beside the most that this machine's memory
and instructions allow. Machines drift, so all run in turn and a figure is the median of the ratios
of neighbouring runs. What the weights lose, `penstock bench quality` says.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from typing import Any, TypeAlias

import torch

from penstock.engine.config import (
    DEMO_MODEL,
    DTYPES,
    QUANTIZATIONS,
    DeviceConfig,
    Quantization,
)
from penstock.engine.engine_core import EngineCore
from penstock.engine.transport.messages import EngineInfo
from penstock.kernels.cpu.library import load_library
from penstock.load.cpu_limits import Ceilings, products_per_s, read_weights
from penstock.load.engine_runs import Lengths, Phase, Run, build_engine, make_requests, run_requests
from penstock.load.machine import frozen_garbage
from penstock.load.memory_rate import MemoryReader
from penstock.load.report.options import add_out, counts
from penstock.load.report.tables import publish, table, table_of

# By number of sequences: of each round, a run of each kind of weights.
Rounds: TypeAlias = dict[int, list[dict[Quantization, Run]]]
# By kind of weights: the best of all rounds.
KindCeilings: TypeAlias = dict[Quantization, Ceilings]

_WARM_UP_TOKENS = 8
_NOTES = """\
tok/s: output tokens of a whole run, medians; times: medians of the ratios to the own dtype's runs
beside them, of the whole run, of its prompts and of the steps in which all sequences decode. What
the weights lose: `penstock bench quality`.
At most: tokens by the time to read the matrices once (nothing else: no KV, no activations) or to
multiply, whichever is longer. MB and products are those of a decode step, or of all prompts, of
which only the last tokens meet the head; attention's are not counted. Before each round all threads
read memory, and multiply a matrix in the L2 cache by the same kernels: the best rates count."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default=DEMO_MODEL, help="a directory or a Hub id")
    add("--dtype", default="auto", choices=DTYPES, help="dtype of everything that is not quantized")
    add(
        "--quantizations",
        type=_kinds,
        default="int8,int4",
        help=f"which to compare, comma-separated: {', '.join(_KINDS)}",
    )
    add(
        "--no-quantize-activations",
        dest="quantize_activations",
        action="store_false",
        help="multiply with inputs as they are",
    )
    add("--num-threads", type=int, default=0, help="CPU threads; 0: the engine's choice")
    add(
        "--num-seqs",
        type=counts,
        default="1,8,32",
        help="numbers of concurrent sequences, comma-separated",
    )
    add("--prompt-tokens", type=int, default=128, help="prompt tokens per request")
    add("--output-tokens", type=int, default=64, help="output tokens per request")
    add("--repeats", type=int, default=3, help="runs of each number of sequences, in turn")
    add("--seed", type=int, default=0, help="seed of prompts")
    add_out(parser)


_KINDS = tuple(each for each in QUANTIZATIONS if each != "none")


def _kinds(text: str) -> tuple[Quantization, ...]:
    """
    Raises:
        ValueError: one is unknown.
    """
    return tuple(_KINDS[_KINDS.index(name)] for name in text.split(","))


def run(parsed: argparse.Namespace) -> int:
    """Measure all; print and write the tables."""
    device = DeviceConfig(device="cpu", num_threads=parsed.num_threads or None)
    kinds: tuple[Quantization, ...] = ("none", *parsed.quantizations)
    rounds_inputs = parsed.quantize_activations
    cores = {
        kind: build_engine(parsed, kind, device, quantize_activations=rounds_inputs)
        for kind in kinds
    }
    infos = {kind: info for kind, (_, info) in cores.items()}
    lengths = Lengths(prompt_tokens=parsed.prompt_tokens, output_tokens=parsed.output_tokens)
    try:
        with frozen_garbage():
            rounds, ceilings = _measure_speed(cores, lengths, parsed)
    finally:
        for core, _ in cores.values():
            core.close()
    info = infos["none"]
    title = f"{info.model} in {info.dtype} and quantized, CPU threads: {info.num_threads}"
    figures = _figures(rounds, infos)
    limits = _limits(rounds, infos, ceilings)
    tables = [_speed_table(figures)]
    if limits:
        tables += [_ceiling_line(ceilings), _limit_table(limits)]
    report = "\n\n".join([title, *tables, _NOTES])
    data = {
        "model": info.model,
        "speed": figures,
        "ceilings": {kind: asdict(each) for kind, each in ceilings.items()},
        "limits": limits,
    }
    publish(parsed.out, "quantization", "quantization", report, data)
    return 0


def _measure_speed(
    cores: Mapping[Quantization, tuple[EngineCore, EngineInfo]],
    lengths: Lengths,
    parsed: argparse.Namespace,
) -> tuple[Rounds, KindCeilings]:
    """Runs of each kind of weights, by number of sequences; which is first alternates, and all
    numbers run once before any runs again."""
    rng = random.Random(parsed.seed)

    def run_once(kind: Quantization, count: int, lengths: Lengths) -> Run:
        core, info = cores[kind]
        requests = make_requests(count, lengths, vocab_size=info.vocab_size, rng=rng)
        return run_requests(core, requests, lengths)

    warm_up = replace(lengths, output_tokens=min(_WARM_UP_TOKENS, lengths.output_tokens))
    for kind, count in product(cores, parsed.num_seqs):  # the first run of a shape is slow
        run_once(kind, count, warm_up)
    rounds: Rounds = {count: [] for count in parsed.num_seqs}
    ceilings: KindCeilings = {}
    for repeat in range(parsed.repeats):
        _raise_ceilings(ceilings, {kind: info for kind, (_, info) in cores.items()}, parsed)
        order = list(cores)[:: 1 if repeat % 2 else -1]
        for count in parsed.num_seqs:
            rounds[count].append({kind: run_once(kind, count, lengths) for kind in order})
    return rounds, ceilings


def _raise_ceilings(
    ceilings: KindCeilings, infos: Mapping[Quantization, EngineInfo], parsed: argparse.Namespace
) -> None:
    """Measure the ceilings again and keep the best; none without the C kernels, or of a checkpoint
    that is quantized already."""
    dtype, num_threads = infos["none"].dtype, infos["none"].num_threads
    library = load_library(getattr(torch, dtype))
    if library is None:
        return
    library.start_threads(num_threads)
    with MemoryReader(num_threads) as reader:
        read = reader.measure()
    for kind in (kind for kind, info in infos.items() if info.quantization == kind):
        multiplied = products_per_s(library, kind, in_bytes=parsed.quantize_activations)
        best = ceilings.get(kind, Ceilings(read_bytes_per_s=0.0, products_per_s=0.0))
        ceilings[kind] = Ceilings(
            read_bytes_per_s=max(read, best.read_bytes_per_s),
            products_per_s=max(multiplied, best.products_per_s),
        )


def _speed_table(figures: Sequence[Mapping[str, Any]]) -> str:
    header = ("weights", "MB", "sequences", "tok/s", "times", "prefill times", "decode times")
    rows = [
        [
            each["quantization"],
            f"{each['weight_bytes'] / 1e6:,.1f}",
            f"{each['num_seqs']:,}",
            f"{each['tokens_per_s']:,.0f}",
            *(f"{each[name]:.2f}" for name in _RATES),
        ]
        for each in figures
    ]
    return table(header, rows)


def _figures(rounds: Rounds, infos: Mapping[Quantization, EngineInfo]) -> list[dict[str, Any]]:
    return [
        {
            "num_seqs": count,
            "quantization": kind,
            "weight_bytes": info.weight_bytes,
            "tokens_per_s": statistics.median(runs[kind].output_tokens_per_s for runs in each),
            **{
                name: statistics.median(rate(runs[kind]) / rate(runs["none"]) for runs in each)
                for name, rate in _RATES.items()
            },
        }
        for count, each in rounds.items()
        for kind, info in infos.items()
    ]


_RATES: dict[str, Callable[[Run], float]] = {
    "ratio": lambda run: run.output_tokens_per_s,
    "prefill_ratio": lambda run: run.prefill_tokens_per_s,
    "decode_ratio": lambda run: run.decode_tokens_per_s,
}


# -- how near that is to the machine's limits ----------------------------------------------------


def _limits(
    rounds: Rounds, infos: Mapping[Quantization, EngineInfo], ceilings: KindCeilings
) -> list[dict[str, Any]]:
    """The speed that the ceilings allow, and the runs' median: of each phase, number of sequences
    and kind of weights that has ceilings."""
    speeds: dict[Phase, Callable[[Run], float]] = {
        "decode": lambda run: run.decode_tokens_per_s,
        "prefill": lambda run: run.prefill_tokens_per_s,
    }
    weights = {kind: read_weights(infos[kind]) for kind in ceilings}
    limits = []
    for (phase, speed), (count, each), kind in product(speeds.items(), rounds.items(), ceilings):
        runs, read = [runs[kind] for runs in each], weights[kind]
        # Of a decode step, or of all prompts.
        num_tokens = count * (runs[0].lengths.prompt_tokens if phase == "prefill" else 1)
        num_products = num_tokens * read.num_in_layers + count * read.num_in_head
        bound = num_tokens / ceilings[kind].bound_s(read.num_bytes, num_products)
        reached = statistics.median(map(speed, runs))
        limits.append(
            {
                "quantization": kind,
                "phase": phase,
                "num_seqs": count,
                "num_tokens": num_tokens,
                "num_bytes": read.num_bytes,
                "num_products": num_products,
                "tokens_per_s": reached,
                "bound_tokens_per_s": bound,
                "share": reached / bound,
            }
        )
    return limits


def _ceiling_line(ceilings: KindCeilings) -> str:
    read = max(each.read_bytes_per_s for each in ceilings.values()) / 1e9
    products = (f"{kind} {each.products_per_s / 1e9:,.0f}" for kind, each in ceilings.items())
    return f"Memory is read at {read:.1f} GB/s. Products a nanosecond: {', '.join(products)}."


def _limit_table(limits: Sequence[Mapping[str, Any]]) -> str:
    columns: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "weights": lambda each: each["quantization"],
        "phase": lambda each: each["phase"],
        "sequences": lambda each: f"{each['num_seqs']:,}",
        "MB": lambda each: f"{each['num_bytes'] / 1e6:,.1f}",
        "M products": lambda each: f"{each['num_products'] / 1e6:,.1f}",
        "tok/s": lambda each: f"{each['tokens_per_s']:,.0f}",
        "at most": lambda each: f"{each['bound_tokens_per_s']:,.0f}",
        "share": lambda each: f"{each['share']:.0%}",
    }
    return table_of(limits, columns)
