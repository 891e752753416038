"""`penstock bench engine`: tokens per second of the engine alone, and where a step's time goes.

No gateway, no other process: requests go through an engine core of this process, by the settings a
server would have. Every count of sequences runs twice in turn, as it is for the speed and with the
parts of its steps timed. On a CPU the rate that memory can be read at is measured beside each run.
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
    QUANTIZATIONS,
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
)
from penstock.engine.engine_core import EngineCore
from penstock.engine.errors import ConfigError, ModelLoadError
from penstock.engine.models.registry import read_model_config
from penstock.engine.startup import build_core
from penstock.engine.text import Tokenizer
from penstock.engine.transport.messages import EngineInfo
from penstock.load.call_timer import CallTimer
from penstock.load.engine_runs import (
    OTHER,
    PARTS,
    Lengths,
    Phase,
    Run,
    Step,
    detokenize_s_per_token,
    make_requests,
    run_requests,
    step_timer,
)
from penstock.load.machine import frozen_garbage
from penstock.load.memory_rate import MemoryReader
from penstock.load.report.options import add_out, counts
from penstock.load.report.plots import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, new_figure
from penstock.load.report.tables import publish, table, table_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.container import BarContainer


# What a decode step reads of memory, and at what share of the rate that memory can be read at.
#
# Weights are read once a step, whatever the number of sequences; keys and values once for each.


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBytes:
    """What a decode step has to read: each number once.

    Attributes:
        kv: of all sequences, at the mean length they have while they decode. All of the past
            counts, of which a layer with a window would read less.
    """

    weights: int  # all matrices. Norms, biases and scales are too few to count.
    kv: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """How fast runs read memory."""

    step_bytes: StepBytes
    rates: Sequence[float]  # bytes a second, of each run's decode steps
    ceilings: Sequence[float]  # bytes a second that memory was read at just before each

    @property
    def share(self) -> float:
        """Of the ceiling: the median over runs, each against its own."""
        pairs = zip(self.rates, self.ceilings, strict=True)
        return statistics.median(rate / ceiling for rate, ceiling in pairs)


def memory_use(info: EngineInfo, runs: Sequence[Run], ceilings: Sequence[float]) -> MemoryUse:
    """Of runs of equally many sequences."""
    step = step_bytes(info, runs[0].lengths, num_seqs=len(runs[0].tokens))
    times_s = [statistics.fmean(step.step_s for step in run.phase("decode")) for run in runs]
    rates = [(step.weights + step.kv) / time_s for time_s in times_s]
    return MemoryUse(step_bytes=step, rates=rates, ceilings=ceilings)


def step_bytes(info: EngineInfo, lengths: Lengths, *, num_seqs: int) -> StepBytes:
    mean_len = lengths.prompt_tokens + lengths.output_tokens / 2
    kv = num_seqs * mean_len * info.bytes_per_block / info.block_size
    return StepBytes(weights=_weight_bytes(info), kv=round(kv))


def _weight_bytes(info: EngineInfo) -> int:
    _, config = read_model_config(Path(info.model_path))
    itemsize: int = getattr(torch, info.dtype).itemsize
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = config.hidden_size * (2 * query + 2 * kv + 3 * config.intermediate_size)
    layers = config.num_layers * layer * (1 if info.quantization == "int8" else itemsize)
    return layers + config.vocab_size * config.hidden_size * itemsize


# -- the command --------------------------------------------------------------------------------

_WARM_UP_TOKENS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default=DEMO_MODEL, help="a directory or a Hub id")
    add("--dtype", default="auto", choices=DTYPES, help="of the weights")
    add("--quantization", default="none", choices=QUANTIZATIONS, help="of the layers' weights")
    add("--device", default="auto", choices=("auto", "cpu", "cuda"), help="for it")
    add("--num-threads", type=int, default=0, help="CPU threads; 0: the engine's choice")
    add("--deterministic", action="store_true", help="refuse what the batch could change")
    add("--num-seqs", type=counts, default="1,8,32", help="sequences at once, with commas")
    add("--prompt-tokens", type=int, default=128, help="of every request")
    add("--output-tokens", type=int, default=128, help="of every request")
    add("--repeats", type=int, default=3, help="runs of each count, in turn")
    add("--seed", type=int, default=0, help="of the prompts")
    add("--plot", action="store_true", help="also draw where a step's time goes")
    add_out(parser)


def run(parsed: argparse.Namespace) -> int:
    """Run every count of sequences; print and write the tables; 0."""
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
        cells = measure(
            core,
            info,
            lengths,
            num_seqs=parsed.num_seqs,
            repeats=parsed.repeats,
            seed=parsed.seed,
            reader=reader,
        )
    title = (
        f"{info.model}, {_types(info)} on {info.device}: {lengths.prompt_tokens} tokens in, "
        f"{lengths.output_tokens} out"
    )
    report = markdown(f"{title}; CPU threads: {info.num_threads}", cells)
    print(report)
    publish(
        parsed.out,
        "engine",
        title="The engine alone",
        report=report,
        data=figures(info, lengths, cells),
        draw=partial(draw, title, cells) if parsed.plot else None,
    )
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
    """Both kinds of runs for every count of sequences, all counts once before any comes again."""
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
    """The run. Raises ConfigError if the first output was complete before the last prompt was
    computed."""
    if not run.phase("decode"):
        raise ConfigError(
            f"--output-tokens {run.lengths.output_tokens} is too few: not once did all "
            f"{len(run.tokens)} sequences decode together"
        )
    return run


def _types(info: EngineInfo) -> str:
    return info.dtype if info.quantization == "none" else f"{info.dtype} and {info.quantization}"


def _build(parsed: argparse.Namespace) -> tuple[EngineCore, EngineInfo]:
    return build_core(
        EngineConfig(
            model=ModelConfig(
                model=parsed.model, dtype=parsed.dtype, quantization=parsed.quantization
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=max(SchedulerConfig().max_num_seqs, *parsed.num_seqs)
            ),
            device=DeviceConfig(
                device=parsed.device,
                num_threads=parsed.num_threads or None,
                deterministic=parsed.deterministic,
            ),
        )
    )


def _check_fits(parsed: argparse.Namespace, info: EngineInfo) -> None:
    """Refuse lengths that do not fit: a preempted sequence would be measured too. Raises
    ConfigError: with the numbers."""
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
    """All runs of one count of sequences."""

    num_seqs: int
    runs: Sequence[Run]  # as the engine is
    split_runs: Sequence[Run]  # with the parts of their steps
    detokenize_s_per_token: float | None  # None without a tokenizer
    memory: MemoryUse | None = None  # None on a GPU

    def split_steps(self, phase: Phase) -> list[Step]:
        return [step for run in self.split_runs for step in run.phase(phase)]

    def policy_share(self) -> float:
        """Policy, preparation and detokenising ÷ the decode step with detokenising."""
        steps = self.split_steps("decode")
        step_s = sum(step.step_s for step in steps)
        text_s = (self.detokenize_s_per_token or 0.0) * sum(step.num_tokens for step in steps)
        policy_s = sum(step.parts_s[part] for step in steps for part in _POLICY)
        return (policy_s + text_s) / (step_s + text_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTime:
    """One part over many steps; `share` is of their whole time."""

    median_ms: float
    p99_ms: float
    mean_ms: float
    share: float


def split(steps: Sequence[Step]) -> dict[str, PartTime]:
    """Every part's time, and the whole step's as `step`."""
    values = {part: [step.parts_s[part] for step in steps] for part in PARTS}
    values["step"] = [step.step_s for step in steps]
    total_s = sum(values["step"])
    return {part: _part_time(times, total_s) for part, times in values.items()}


def _part_time(times_s: Sequence[float], total_s: float) -> PartTime:
    median, p99 = 1e3 * np.percentile(times_s, (50, 99))
    return PartTime(
        median_ms=float(median),
        p99_ms=float(p99),
        mean_ms=1e3 * statistics.fmean(times_s),
        share=sum(times_s) / total_s,
    )


# -- words ------------------------------------------------------------------------------------


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
        text_s = cell.detokenize_s_per_token
        median, p99 = np.percentile(
            [1e3 * step.step_s for run in cell.runs for step in run.phase("decode")], (50, 99)
        )
        rows.append(
            [
                f"{cell.num_seqs:,}",
                f"{statistics.median(rates):,.0f}",
                f"{min(rates):,.0f}–{max(rates):,.0f}",
                f"{statistics.median(run.prefill_tokens_per_s for run in cell.runs):,.0f}",
                f"{statistics.median(run.decode_tokens_per_s for run in cell.runs):,.0f}",
                f"{median:.2f}",
                f"{p99:.2f}",
                "–" if text_s is None else f"{1e6 * text_s:.1f}",
            ]
        )
    return table(header, rows)


def _memory_table(uses: Mapping[int, MemoryUse]) -> str:
    return table_of(
        uses.items(),
        {
            "sequences": lambda item: f"{item[0]:,}",
            "weights MB": lambda item: f"{item[1].step_bytes.weights / 1e6:,.1f}",
            "KV MB": lambda item: f"{item[1].step_bytes.kv / 1e6:,.1f}",
            "read GB/s": lambda item: f"{statistics.median(item[1].rates) / 1e9:.1f}",
            "at most GB/s": lambda item: f"{statistics.median(item[1].ceilings) / 1e9:.1f}",
            "share": lambda item: f"{item[1].share:.0%}",
        },
    )


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
    return {
        "model": info.model,
        "dtype": info.dtype,
        "device": info.device,
        "num_threads": info.num_threads,
        "torch": torch.__version__,
        **asdict(lengths),
        "cells": [
            {
                "num_seqs": cell.num_seqs,
                "num_output_tokens": sum(map(len, cell.runs[0].tokens)),
                "output_tokens_per_s": [run.output_tokens_per_s for run in cell.runs],
                "prefill_tokens_per_s": [run.prefill_tokens_per_s for run in cell.runs],
                "decode_tokens_per_s": [run.decode_tokens_per_s for run in cell.runs],
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
_COLOURS = {
    "schedule": BLUE,
    "prepare": SKY,
    _FORWARD: ORANGE,
    "sample": GREEN,
    "update": PURPLE,
    OTHER: GREY,
}


def draw(title: str, cells: Sequence[Cell], path: Path) -> None:
    """Draw a decode step's parts by the number of sequences, with and without the forward pass.
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
    axes: Axes,
    names: Sequence[str],
    splits: Sequence[Mapping[str, PartTime]],
    *,
    parts: Sequence[str],
) -> BarContainer:
    """Stack the parts; the bars on top."""
    bottoms = [0.0] * len(names)
    for part in parts:
        heights = [each[part].mean_ms for each in splits]
        bars = axes.bar(names, heights, 0.6, bottom=bottoms, label=part, color=_COLOURS[part])
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axes.set_xlabel("sequences")
    axes.margins(y=0.1)
    return bars
