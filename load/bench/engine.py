"""`penstock bench engine`: tokens per second of the engine alone, and where a step's time goes.

Requests go through an engine core in this process, configured as in a server; there is no gateway.
Each number of sequences runs twice in turn: once unchanged for its speed, once with the parts of
its steps timed. On a CPU, the rate at which memory can be read is measured beside each run.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from penstock.engine.config import (
    DEMO_MODEL,
    DTYPES,
    KV_CACHE_DTYPES,
    MODEL_IMPLS,
    QUANTIZATIONS,
    DeviceConfig,
)
from penstock.engine.engine_core import EngineCore
from penstock.engine.errors import ConfigError, ModelLoadError
from penstock.engine.text import Tokenizer
from penstock.engine.transport.messages import EngineInfo
from penstock.load.cpu_limits import read_weights
from penstock.load.engine_runs import (
    PARTS,
    Lengths,
    Phase,
    Run,
    Step,
    build_engine,
    detokenize_s_per_token,
    make_requests,
    run_requests,
    step_timer,
)
from penstock.load.machine import CallTimer, frozen_garbage
from penstock.load.memory_rate import MemoryReader
from penstock.load.report.options import add_out, counts
from penstock.load.report.plots import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, new_figure
from penstock.load.report.tables import publish, table, table_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.container import BarContainer


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBytes:
    """Bytes that a decode step has to read, each number once.

    Weights are read once a step, keys and values once for each sequence: its whole past at the mean
    length while decoding, although a layer with a window reads less.
    """

    weights: int  # all matrices; norms, biases and scales are too few to count
    kv: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """How fast runs read memory."""

    step_bytes: StepBytes
    rates: Sequence[float]  # bytes a second, of each run's decode steps
    ceilings: Sequence[float]  # bytes a second that memory was read at just before each run

    @property
    def share(self) -> float:
        """Share of the ceiling: the median over runs, each against its own."""
        pairs = zip(self.rates, self.ceilings, strict=True)
        return statistics.median(rate / ceiling for rate, ceiling in pairs)


def memory_use(info: EngineInfo, runs: Sequence[Run], ceilings: Sequence[float]) -> MemoryUse:
    """The memory use of runs with the same number of sequences."""
    lengths = runs[0].lengths
    mean_len = lengths.prompt_tokens + lengths.output_tokens / 2
    kv = len(runs[0].tokens) * mean_len * info.bytes_per_block / info.block_size
    step = StepBytes(weights=read_weights(info).num_bytes, kv=round(kv))
    times_s = [statistics.fmean(step.step_s for step in run.phase("decode")) for run in runs]
    rates = [(step.weights + step.kv) / time_s for time_s in times_s]
    return MemoryUse(step_bytes=step, rates=rates, ceilings=ceilings)


# -- the command --------------------------------------------------------------------------------

_WARM_UP_TOKENS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default=DEMO_MODEL, help="a directory or a Hub id")
    add("--model-impl", default="auto", choices=MODEL_IMPLS, help="whose code runs the model")
    add("--dtype", default="auto", choices=DTYPES, help="dtype of the weights")
    add(
        "--quantization",
        default="none",
        choices=QUANTIZATIONS,
        help="quantization of the weights",
    )
    add(
        "--no-quantize-activations",
        dest="quantize_activations",
        action="store_false",
        help="multiply quantized weights with inputs as they are",
    )
    add("--kv-cache-dtype", default="auto", choices=KV_CACHE_DTYPES, help="dtype of the KV cache")
    add("--device", default="auto", choices=("auto", "cpu", "cuda"), help="where to run")
    add("--num-threads", type=int, default=0, help="CPU threads; 0: the engine's choice")
    add(
        "--deterministic",
        action="store_true",
        help="forbid everything whose result depends on the batch",
    )
    add(
        "--num-seqs",
        type=counts,
        default="1,8,32",
        help="numbers of concurrent sequences, comma-separated",
    )
    add("--prompt-tokens", type=int, default=128, help="prompt tokens per request")
    add("--output-tokens", type=int, default=128, help="output tokens per request")
    add("--repeats", type=int, default=3, help="runs of each number of sequences, in turn")
    add("--seed", type=int, default=0, help="seed of the prompts")
    add("--plot", action="store_true", help="also draw where a step's time goes")
    add_out(parser)


def run(parsed: argparse.Namespace) -> int:
    """Measure every number of sequences; print and write the tables."""
    if parsed.prompt_tokens < 1 or parsed.output_tokens < 2 or parsed.repeats < 1:
        raise ConfigError("--prompt-tokens and --repeats must be at least 1, --output-tokens 2")
    lengths = Lengths(prompt_tokens=parsed.prompt_tokens, output_tokens=parsed.output_tokens)
    core, info = _build(parsed)
    with ExitStack() as stack:
        stack.callback(core.close)
        _check_fits(parsed, info)
        reader = None
        if info.device == "cpu":
            reader = stack.enter_context(MemoryReader(info.num_threads))
        stack.enter_context(frozen_garbage())
        settings = {name: getattr(parsed, name) for name in ("num_seqs", "repeats", "seed")}
        cells = measure(core, info, lengths, **settings, reader=reader)
    types = info.dtype if info.quantization == "none" else f"{info.dtype} and {info.quantization}"
    if parsed.kv_cache_dtype != "auto":
        types += f" with {parsed.kv_cache_dtype} KV"
    title = (
        f"{info.model}, {types} on {info.device}: {lengths.prompt_tokens} tokens in, "
        f"{lengths.output_tokens} out"
    )
    report = markdown(f"{title}; CPU threads: {info.num_threads}", cells)
    data = figures(info, lengths, cells)
    picture = partial(draw, title, cells) if parsed.plot else None
    publish(parsed.out, "engine", "The engine alone", report, data, draw=picture)
    return 0


def measure(
    core: EngineCore,
    info: EngineInfo,
    lengths: Lengths,
    *,
    num_seqs: Sequence[int],
    repeats: int,
    seed: int,
    reader: MemoryReader | None = None,
) -> list[Cell]:
    """Run every number of sequences plain and timed; all of them once before any runs again."""
    rng, timer = random.Random(seed), step_timer(info.device)

    def run_once(count: int, timer: CallTimer | None, lengths: Lengths = lengths) -> Run:
        requests = make_requests(count, lengths, vocab_size=info.vocab_size, rng=rng)
        return run_requests(core, requests, lengths, timer=timer)

    warm_up = replace(lengths, output_tokens=min(_WARM_UP_TOKENS, lengths.output_tokens))
    for count in num_seqs:  # the first run of a shape in a process is slow
        run_once(count, None, warm_up)
    plain: dict[int, list[Run]] = {count: [] for count in num_seqs}
    split: dict[int, list[Run]] = {count: [] for count in num_seqs}
    ceilings: dict[int, list[float]] = {count: [] for count in num_seqs}
    for _ in range(repeats):
        for count in num_seqs:
            if reader is not None:
                ceilings[count].append(reader.measure())
            plain[count].append(_require_decode(run_once(count, None)))
            with timer.attached():
                split[count].append(_require_decode(run_once(count, timer)))
    return [_cell(plain[count], split[count], ceilings[count], info) for count in num_seqs]


def _cell(
    runs: Sequence[Run], split_runs: Sequence[Run], ceilings: Sequence[float], info: EngineInfo
) -> Cell:
    tokens = runs[-1].tokens
    return Cell(
        num_seqs=len(tokens),
        runs=runs,
        split_runs=split_runs,
        detokenize_s_per_token=_detokenize_s(tokens, info),
        memory=memory_use(info, runs, ceilings) if ceilings else None,
    )


def _require_decode(run: Run) -> Run:
    """The run. Raises ConfigError if an output was complete before the last prompt was computed."""
    if not run.phase("decode"):
        raise ConfigError(
            f"--output-tokens {run.lengths.output_tokens} is too few: not once did all "
            f"{len(run.tokens)} sequences decode together"
        )
    return run


def _build(parsed: argparse.Namespace) -> tuple[EngineCore, EngineInfo]:
    return build_engine(
        parsed,
        parsed.quantization,
        DeviceConfig(
            device=parsed.device,
            num_threads=parsed.num_threads or None,
            deterministic=parsed.deterministic,
        ),
        quantize_activations=parsed.quantize_activations,
        kv_cache_dtype=parsed.kv_cache_dtype,
        model_impl=parsed.model_impl,
    )


def _check_fits(parsed: argparse.Namespace, info: EngineInfo) -> None:
    """Raises ConfigError if the lengths do not fit: preempted sequences would distort figures."""
    num_tokens = parsed.prompt_tokens + parsed.output_tokens
    if num_tokens > info.max_model_len:
        raise ConfigError(f"{num_tokens} tokens exceed the context of {info.max_model_len}")
    num_blocks = (max(parsed.num_seqs) + 1) * -(-num_tokens // info.block_size)
    if num_blocks > info.num_blocks:
        raise ConfigError(
            f"--num-seqs {max(parsed.num_seqs)} needs {num_blocks} KV blocks, and there are "
            f"{info.num_blocks}"
        )


def _detokenize_s(tokens: Sequence[Sequence[int]], info: EngineInfo) -> float | None:
    try:
        tokenizer = Tokenizer.from_directory(Path(info.model_path))
    except ModelLoadError:  # weights alone are enough for the engine
        return None
    return detokenize_s_per_token(tokens, tokenizer)


# -- what is said of it -------------------------------------------------------------------------

_BAR = 0.10
_MEMORY = """\
What a decode step has to read of memory, how fast it does so, and how fast memory was read just \
before each run by as many threads (bar: 75% of that, for one sequence of M):"""
_POLICY = ("schedule", "prepare", "update")
_NOTES = """\
tok/s: output tokens of a whole run; prefill: prompt tokens while not every sequence had its first
token; decode: while all sequences took a token each. Medians of the repeats.
Parts: schedule and update are the scheduler's, prepare makes the tensors of a step, forward runs
the model to its logits (the CPU's kernels draw the tokens in the same call), sample chooses tokens,
other is all the rest of the step. They are timed in runs of their own; on a GPU each part waits for
the device there. Shares are of the sum over all steps, so they add up; medians need not.
Detokenising is the gateway's and no part of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """All runs with one number of sequences."""

    num_seqs: int
    runs: Sequence[Run]  # as the engine is
    split_runs: Sequence[Run]  # with the parts of their steps
    detokenize_s_per_token: float | None  # None without a tokenizer
    memory: MemoryUse | None = None  # None on a GPU

    def split_steps(self, phase: Phase) -> list[Step]:
        return [step for run in self.split_runs for step in run.phase(phase)]

    def policy_share(self) -> float:
        """(Policy, preparation and detokenising) ÷ (decode step and detokenising)."""
        steps = self.split_steps("decode")
        step_s = sum(step.step_s for step in steps)
        text_s = (self.detokenize_s_per_token or 0.0) * sum(step.num_tokens for step in steps)
        policy_s = sum(step.parts_s[part] for step in steps for part in _POLICY)
        return (policy_s + text_s) / (step_s + text_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTime:
    """The time of one part over many steps; `share` is its share of their whole time."""

    median_ms: float
    p99_ms: float
    mean_ms: float
    share: float


def split(steps: Sequence[Step]) -> dict[str, PartTime]:
    """The time of every part, and of the whole step as `step`."""
    values = {part: [step.parts_s[part] for step in steps] for part in PARTS}
    values["step"] = [step.step_s for step in steps]
    found = {}
    for part, times_s in values.items():
        median, p99 = (1e3 * np.percentile(times_s, (50, 99))).tolist()
        found[part] = PartTime(
            median_ms=median,
            p99_ms=p99,
            mean_ms=1e3 * statistics.fmean(times_s),
            share=sum(times_s) / sum(values["step"]),
        )
    return found


def markdown(title: str, cells: Sequence[Cell]) -> str:
    memory = {cell.num_seqs: cell.memory for cell in cells if cell.memory is not None}
    return "\n\n".join(
        [
            title,
            _speeds(cells),
            *([_MEMORY, _memory_table(memory)] if memory else []),
            "Decode step by its parts, ms: median / 99th percentile, share of the time:",
            _split_table(
                cells,
                "decode",
                lambda part: f"{part.median_ms:.3f} / {part.p99_ms:.3f}  {part.share:6.1%}",
            ),
            "Steps with prompts in them, ms: mean, share of the time:",
            _split_table(cells, "prefill", lambda part: f"{part.mean_ms:.3f}  {part.share:6.1%}"),
            _verdict(cells),
            _NOTES,
        ]
    )


def _speeds(cells: Sequence[Cell]) -> str:
    header = ("sequences", "tok/s", "min–max", "prefill tok/s", "decode tok/s", "step ms",
              "p99 ms", "detokenise µs/token")  # fmt: skip
    rows = []
    for cell in cells:
        rates = [run.output_tokens_per_s for run in cell.runs]
        prefill = statistics.median(run.prefill_tokens_per_s for run in cell.runs)
        decode = statistics.median(run.decode_tokens_per_s for run in cell.runs)
        text_s = cell.detokenize_s_per_token
        steps_s = [step.step_s for run in cell.runs for step in run.phase("decode")]
        shown = [f"{cell.num_seqs:,}", f"{statistics.median(rates):,.0f}"]
        shown += [f"{min(rates):,.0f}–{max(rates):,.0f}", f"{prefill:,.0f}", f"{decode:,.0f}"]
        shown += [f"{1e3 * value:.2f}" for value in np.percentile(steps_s, (50, 99))]
        rows.append([*shown, "–" if text_s is None else f"{1e6 * text_s:.1f}"])
    return table(header, rows)


def _memory_table(uses: Mapping[int, MemoryUse]) -> str:
    columns: dict[str, Callable[[tuple[int, MemoryUse]], str]] = {
        "sequences": lambda item: f"{item[0]:,}",
        "weights MB": lambda item: f"{item[1].step_bytes.weights / 1e6:,.1f}",
        "KV MB": lambda item: f"{item[1].step_bytes.kv / 1e6:,.1f}",
        "read GB/s": lambda item: f"{statistics.median(item[1].rates) / 1e9:.1f}",
        "at most GB/s": lambda item: f"{statistics.median(item[1].ceilings) / 1e9:.1f}",
        "share": lambda item: f"{item[1].share:.0%}",
    }
    return table_of(uses.items(), columns)


def _split_table(cells: Sequence[Cell], phase: Phase, text: Callable[[PartTime], str]) -> str:
    splits = [split(cell.split_steps(phase)) for cell in cells]
    header = ["part", *(f"{cell.num_seqs:,} at once" for cell in cells)]
    rows = [[part, *(text(each[part]) for each in splits)] for part in (*PARTS, "step")]
    return table(header, rows)


def _verdict(cells: Sequence[Cell]) -> str:
    last = cells[-1]
    parts = "Policy and preparation"
    if last.detokenize_s_per_token is not None:
        parts = "Policy, preparation and detokenising"
    return (
        f"{parts} take {last.policy_share():.1%} of a decode step with {last.num_seqs} sequences "
        f"(bar: {_BAR:.0%} with 32)."
    )


def figures(info: EngineInfo, lengths: Lengths, cells: Sequence[Cell]) -> dict[str, Any]:
    """Everything measured, as plain data."""
    rates = ("output_tokens_per_s", "prefill_tokens_per_s", "decode_tokens_per_s")
    return {
        **{name: getattr(info, name) for name in ("model", "dtype", "device", "num_threads")},
        "torch": torch.__version__,
        **asdict(lengths),
        "cells": [
            {
                "num_seqs": cell.num_seqs,
                "num_output_tokens": sum(map(len, cell.runs[0].tokens)),
                **{rate: [getattr(run, rate) for run in cell.runs] for rate in rates},
                "detokenize_s_per_token": cell.detokenize_s_per_token,
                "policy_share": cell.policy_share(),
                "memory": cell.memory and {**asdict(cell.memory), "share": cell.memory.share},
                "num_decode_steps": len(cell.split_steps("decode")),
                "decode": _plain(split(cell.split_steps("decode"))),
                "prefill": _plain(split(cell.split_steps("prefill"))),
            }
            for cell in cells
        ],
    }


def _plain(parts: Mapping[str, PartTime]) -> dict[str, dict[str, float]]:
    return {name: asdict(part) for name, part in parts.items()}


# -- the picture ------------------------------------------------------------------------------

_FORWARD = "forward"
_COLOURS = dict(zip(PARTS, (BLUE, SKY, ORANGE, GREEN, PURPLE, GREY), strict=True))


def draw(title: str, cells: Sequence[Cell], path: Path) -> None:
    """Draw the parts of a decode step by number of sequences, with and without the forward pass.
    Raises ConfigError if matplotlib is not installed."""
    figure = new_figure(10, 4)
    figure.suptitle(f"Where a decode step's time goes\n{title}", x=0.01, ha="left", size=11)
    left, right = figure.subplots(1, 2)
    names = [f"{cell.num_seqs:,}" for cell in cells]
    splits = [split(cell.split_steps("decode")) for cell in cells]
    bars = _draw_bars(left, names, splits, parts=PARTS)
    left.bar_label(bars, [f"{each['step'].mean_ms:.1f} ms" for each in splits], padding=2)
    left.set_title("the whole step, mean (ms)")
    parts = [part for part in PARTS if part != _FORWARD]
    bars = _draw_bars(right, names, splits, parts=parts)
    rests = [1.0 - each[_FORWARD].share for each in splits]
    right.bar_label(bars, [f"{rest:.1%} of the step" for rest in rests], padding=2)
    right.set_title("all but the forward pass, mean (ms)")
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center")
    figure.savefig(path, dpi=150)


def _draw_bars(
    axes: Axes, names: list[str], splits: list[dict[str, PartTime]], *, parts: Sequence[str]
) -> BarContainer:
    """Stack the parts; return the top bars."""
    bottoms = [0.0] * len(names)
    for part in parts:
        heights = [each[part].mean_ms for each in splits]
        bars = axes.bar(names, heights, 0.6, bottom=bottoms, label=part, color=_COLOURS[part])
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axes.set_xlabel("sequences")
    axes.margins(y=0.1)
    return bars
