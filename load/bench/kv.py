"""`penstock bench kv`: replays one trace of lengths with three ways to allocate KV memory.

No model runs; the same seed gives the same figures on every machine.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.engine.batch import Batch, BatchResult
from penstock.engine.blocks import BlockManager
from penstock.engine.config import SchedulerConfig
from penstock.engine.errors import ConfigError
from penstock.engine.request import Request, SamplingParams
from penstock.engine.scheduling import Scheduler
from penstock.load.report.options import add_out, counts
from penstock.load.report.plots import BLUE, GREEN, GREY, ORANGE, SKY, new_figure
from penstock.load.report.tables import publish, table_of
from penstock.load.workloads.lengths import TracedRequest, TraceSpec, cut_outputs, make_trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# Three ways to allocate KV memory, in the same number of bytes:
#
#     max length             each sequence reserves the model's whole context, contiguously
#     prompt + max_tokens    each reserves what its request may need, contiguously
#     paged                  blocks as it grows: the engine's own scheduler and block manager
#
# All three admit in order of arrival under the same token budget per step, and every running
# sequence gets one token a step. The contiguous schemes never preempt; the paged one recomputes
# preempted sequences. Only the device knows where an output ends: it samples EOS there.
#
# Source: PagedAttention (Kwon et al., SOSP 2023), sections 3 and 6.2, figure 2.

_EOS, _WORD = 0, 1
_FIRST_PROMPT_TOKEN = 2

Trace = Sequence[TracedRequest]


@dataclass(slots=True, kw_only=True)
class Replay:
    """The counts of a replay. `used`, `allocated` and `running` have one sample per step: slots
    that hold a token, slots allocated to running sequences, and running sequences."""

    scheme: str
    num_slots: int  # tokens the pool holds
    used: list[int] = field(default_factory=list)
    allocated: list[int] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    num_finished: int = 0
    num_preemptions: int = 0
    num_before_preemption: int | None = None  # sequences running at the first preemption
    num_computed_tokens: int = 0  # with those computed again after a preemption

    def sample(self, used: int, allocated: int, running: int) -> None:
        self.used.append(used)
        self.allocated.append(allocated)
        self.running.append(running)

    @property
    def num_steps(self) -> int:
        return len(self.running)

    @property
    def waste(self) -> float:
        """Empty ÷ allocated slots of running sequences, summed over steps."""
        return 1.0 - sum(self.used) / sum(self.allocated)

    @property
    def utilisation(self) -> float:
        """Share of the pool that holds tokens, mean over steps."""
        return sum(self.used) / (self.num_slots * self.num_steps)

    @property
    def mean_running(self) -> float:
        return sum(self.running) / self.num_steps

    @property
    def num_held(self) -> int:
        """Sequences running at the first preemption; without one, the most that ever ran."""
        if self.num_before_preemption is not None:
            return self.num_before_preemption
        return max(self.running)


class ContiguousPool:
    """Token slots allocated contiguously, from the first hole that is large enough."""

    def __init__(self, num_slots: int) -> None:
        self._holes = [(0, num_slots)]  # (start, size), by start; never adjacent

    def allocate(self, size: int) -> int | None:
        """The start of the allocation, or None if no hole is large enough."""
        for index, (start, hole) in enumerate(self._holes):
            if hole >= size:
                rest = [(start + size, hole - size)] if hole > size else []
                self._holes[index : index + 1] = rest
                return start
        return None

    def release(self, start: int, size: int) -> None:
        merged: list[tuple[int, int]] = []
        for hole in sorted([*self._holes, (start, size)]):
            if merged and sum(merged[-1]) == hole[0]:
                merged[-1] = (merged[-1][0], merged[-1][1] + hole[1])
            else:
                merged.append(hole)
        self._holes = merged


@dataclass(slots=True)
class _Reservation:
    """A running sequence of a contiguous scheme."""

    request: TracedRequest
    start: int
    size: int
    num_tokens: int
    num_computed: int = 0


@dataclass(frozen=True, slots=True)
class ContiguousScheme:
    """Reserves memory for a sequence's whole life before it starts."""

    name: str
    reserve: Callable[[TracedRequest], int]  # slots that a request reserves
    max_batched_tokens: int  # tokens computed in one step

    def replay(self, trace: Trace, *, num_slots: int) -> Replay:
        """Run the trace to its end. Raises ConfigError if one request reserves more than the pool
        has."""
        if max(map(self.reserve, trace)) > num_slots:
            raise ConfigError(f"the pool of {num_slots} tokens cannot hold one request")
        replay = Replay(scheme=self.name, num_slots=num_slots)
        pool = ContiguousPool(num_slots)
        waiting: deque[TracedRequest] = deque()
        running: list[_Reservation] = []
        for arrived in _arrivals(trace, lambda: bool(waiting or running)):
            waiting.extend(arrived)
            self._admit(waiting, running, pool)
            replay.num_computed_tokens += self._compute(running)
            used = sum(row.num_computed for row in running)
            replay.sample(used, sum(row.size for row in running), len(running))
            for row in running:
                row.num_tokens += row.num_computed == row.num_tokens  # its next token
            ended = [row for row in running if row.num_tokens == row.request.num_tokens]
            for row in ended:
                pool.release(row.start, row.size)
            running[:] = [row for row in running if row.num_tokens < row.request.num_tokens]
            replay.num_finished += len(ended)
        return replay

    def _admit(
        self, waiting: deque[TracedRequest], running: list[_Reservation], pool: ContiguousPool
    ) -> None:
        budget = self.max_batched_tokens
        budget -= sum(row.num_tokens - row.num_computed for row in running)
        while waiting and budget > 0:
            size = self.reserve(waiting[0])
            start = pool.allocate(size)
            if start is None:
                return
            request = waiting.popleft()
            running.append(_Reservation(request, start, size, request.num_prompt_tokens))
            budget -= request.num_prompt_tokens

    def _compute(self, running: list[_Reservation]) -> int:
        """Compute tokens in order of admission; return how many."""
        budget = self.max_batched_tokens
        for row in running:
            num_new = min(row.num_tokens - row.num_computed, budget)
            row.num_computed += num_new
            budget -= num_new
        return self.max_batched_tokens - budget


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedScheme:
    """The engine's scheduler and block manager, with a device that computes nothing."""

    block_size: int
    max_tokens: int  # declared by each request
    max_model_len: int
    max_batched_tokens: int  # tokens computed in one step

    @property
    def name(self) -> str:
        return f"paged, block {self.block_size}"

    def replay(self, trace: Trace, *, num_slots: int) -> Replay:
        """Run the trace to its end. Raises ConfigError if the pool is smaller than one context."""
        num_blocks = num_slots // self.block_size
        replay = Replay(scheme=self.name, num_slots=num_blocks * self.block_size)
        # As many as there are may run, so that memory alone limits.
        scheduler = self._scheduler(num_blocks, max_num_seqs=len(trace))
        device = StandInDevice([request.num_output_tokens for request in trace])
        index = 0
        for arrived in _arrivals(trace, scheduler.has_work):
            for request in arrived:
                scheduler.add(self._request(index, request))
                index += 1
            num_running = scheduler.num_running
            batch = scheduler.schedule()
            if scheduler.counters.num_preemptions and replay.num_before_preemption is None:
                replay.num_before_preemption = num_running
            if batch.scheduled:
                allocated, empty = scheduler.slots()
                replay.sample(allocated - empty, allocated, scheduler.num_running)
            outputs = scheduler.update(batch, device.run(batch))
            replay.num_computed_tokens += batch.num_tokens
            replay.num_finished += sum(output.is_last for output in outputs)
        replay.num_preemptions = scheduler.counters.num_preemptions
        return replay

    def _scheduler(self, num_blocks: int, *, max_num_seqs: int) -> Scheduler:
        num_tokens = self.max_batched_tokens
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=num_tokens, preemption="recompute"
        )
        blocks = BlockManager(
            num_blocks=num_blocks, block_size=self.block_size, enable_prefix_caching=False
        )
        return Scheduler(config, blocks, eos_token_ids=(_EOS,), max_model_len=self.max_model_len)

    def _request(self, index: int, request: TracedRequest) -> Request:
        return Request(
            request_id=str(index),
            # The prompt says to the stand-in device which request it is.
            prompt_token_ids=(_FIRST_PROMPT_TOKEN + index,) * request.num_prompt_tokens,
            sampling_params=SamplingParams(max_tokens=self.max_tokens),
            arrival_s=request.arrival,
        )


@dataclass(slots=True)
class _Row:
    num_tokens: int
    num_computed: int
    end: int  # num_tokens at which it has ended


class StandInDevice:
    """Samples a word for every sequence that is due a token, and EOS as the last token of its
    output."""

    def __init__(self, output_lengths: Sequence[int]) -> None:
        self._output_lengths = output_lengths
        self._rows: dict[int, _Row] = {}

    def run(self, batch: Batch) -> BatchResult:
        for seq_id in batch.left_seq_ids:
            del self._rows[seq_id]
        sampled: dict[int, tuple[int, ...]] = {}
        for item in batch.scheduled:
            entry = item.entry
            if entry is not None:
                length = self._output_lengths[entry.token_ids[0] - _FIRST_PROMPT_TOKEN]
                self._rows[item.seq_id] = _Row(
                    num_tokens=len(entry.token_ids),
                    num_computed=entry.num_computed_tokens,
                    end=entry.num_prompt_tokens + length,
                )
            row = self._rows[item.seq_id]
            row.num_computed += item.num_new_tokens
            if row.num_computed == row.num_tokens:
                row.num_tokens += 1
                sampled[item.seq_id] = (_EOS if row.num_tokens == row.end else _WORD,)
        return BatchResult(step=batch.step, token_ids=sampled)


def _arrivals(trace: Trace, has_work: Callable[[], bool]) -> Iterator[list[TracedRequest]]:
    """Per step, the requests that arrived since the last step; idle steps are skipped."""
    step, index = 0, 0
    while index < len(trace) or has_work():
        first = index
        while index < len(trace) and trace[index].arrival <= step:
            index += 1
        if index > first or has_work():
            yield list(trace[first:index])
        step += 1


# -- the command --------------------------------------------------------------------------------

_SPEC = TraceSpec()
_SHORT_PROMPT, _SHORT_OUTPUT = 19.0, 58.0  # means of Alpaca instructions, as in the paper
_POOL_BLOCK_SIZE = 16  # --num-blocks counts these, whatever the block sizes compared


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--requests", type=int, default=_SPEC.num_requests, help="requests in the trace")
    add("--seed", type=int, default=_SPEC.seed, help="seed of the trace")
    add("--rate", type=float, default=0.0, help="requests per step; 0: all at once")
    add("--prompt-mean", type=float, default=_SPEC.prompt_mean, help="tokens, before clipping")
    add("--output-mean", type=float, default=_SPEC.output_mean, help="tokens, before clipping")
    add(
        "--sigma",
        type=float,
        default=_SPEC.sigma,
        help="standard deviation of the logarithm of lengths",
    )
    add("--max-tokens", type=int, default=1024, help="max_tokens of every request")
    add("--max-model-len", type=int, default=2048, help="context in tokens")
    add(
        "--block-size",
        type=counts,
        default="8,16,32,64",
        help="block sizes to compare, comma-separated",
    )
    add("--num-blocks", type=int, default=2048, help=f"the pool, in blocks of {_POOL_BLOCK_SIZE}")
    add("--max-num-batched-tokens", type=int, default=2048, help="tokens computed per step")
    add_out(parser)


def run(parsed: argparse.Namespace) -> int:
    """Replay, print the tables and write them; 0."""
    _check(parsed)
    spec = TraceSpec(
        num_requests=parsed.requests,
        seed=parsed.seed,
        prompt_mean=parsed.prompt_mean,
        output_mean=parsed.output_mean,
        sigma=parsed.sigma,
        rate=parsed.rate or None,
    )
    short = replace(spec, prompt_mean=_SHORT_PROMPT, output_mean=_SHORT_OUTPUT)
    cases = [(spec, parsed.max_tokens), (spec, parsed.max_tokens // 2), (short, parsed.max_tokens)]
    workloads = [_replay(case, max_tokens, parsed) for case, max_tokens in cases]
    block_size: int = 16 if 16 in parsed.block_size else parsed.block_size[0]
    parts = [*map(markdown, workloads), verdict(workloads[0], block_size=block_size), _NOTES]
    data = {"workloads": [figures(workload) for workload in workloads]}
    picture = partial(draw, workloads, block_size)
    title = "KV memory by allocation scheme"
    publish(parsed.out, "kv", title, "\n\n".join(parts), data, draw=picture)
    return 0


def _replay(spec: TraceSpec, max_tokens: int, parsed: argparse.Namespace) -> Workload:
    trace = cut_outputs(make_trace(spec), max_tokens)
    budget: int = parsed.max_num_batched_tokens
    context: int = parsed.max_model_len
    contiguous: dict[str, Callable[[TracedRequest], int]] = {
        "max length": lambda _: context,
        "prompt + max_tokens": lambda request: request.num_prompt_tokens + max_tokens,
        "prompt + exact output": lambda request: request.num_tokens,
    }
    num_slots = parsed.num_blocks * _POOL_BLOCK_SIZE
    prompt = sum(request.num_prompt_tokens for request in trace) / len(trace)
    output = sum(request.num_output_tokens for request in trace) / len(trace)
    label = f"{prompt:.0f} + {output:.0f} tokens, max_tokens {max_tokens:,}"
    return Workload(
        title=f"{len(trace):,} requests of {label}, context {context:,}, pool of {num_slots:,} "
        "token slots",
        label=label,
        # The last token of an output is sampled and never computed.
        num_tokens=sum(request.num_tokens - 1 for request in trace),
        contiguous=[
            ContiguousScheme(name, reserve, budget).replay(trace, num_slots=num_slots)
            for name, reserve in contiguous.items()
        ],
        paged=[
            PagedScheme(
                block_size=block_size,
                max_tokens=max_tokens,
                max_model_len=context,
                max_batched_tokens=budget,
            ).replay(trace, num_slots=num_slots)
            for block_size in parsed.block_size
        ],
    )


def _check(parsed: argparse.Namespace) -> None:
    if parsed.max_tokens < 2 * _SPEC.shortest:
        raise ConfigError(f"--max-tokens must be at least {2 * _SPEC.shortest}")
    if parsed.max_model_len < _SPEC.longest + parsed.max_tokens:
        raise ConfigError(
            f"--max-model-len must hold the longest prompt ({_SPEC.longest}) and --max-tokens"
        )


# -- what is said of it -------------------------------------------------------------------------

_NOTES = """\
waste: empty ÷ allocated token slots of running sequences, summed over steps. pool used: share of
all slots that hold a token, mean over steps. held at once: sequences running when memory first
forced one out; of the contiguous schemes, which reserve beforehand, the most that ever ran. mean
running: over all steps. recomputed: tokens computed again after preemptions ÷ all computed."""
_MAX_POINTS = 600  # of a curve; finer than the picture's pixels is lost


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One trace and its replays."""

    title: str
    label: str
    num_tokens: int  # prompt and output, each computed once
    contiguous: Sequence[Replay]
    paged: Sequence[Replay]

    @property
    def replays(self) -> list[Replay]:
        return [*self.contiguous, *self.paged]


def markdown(workload: Workload) -> str:
    """The workload's title and table."""
    columns: dict[str, Callable[[Replay], str]] = {
        "scheme": lambda replay: replay.scheme,
        "waste": lambda replay: f"{replay.waste:.1%}",
        "pool used": lambda replay: f"{replay.utilisation:.1%}",
        "held at once": lambda replay: f"{replay.num_held:,}",
        "mean running": lambda replay: f"{replay.mean_running:.1f}",
        "steps": lambda replay: f"{replay.num_steps:,}",
        "preemptions": lambda replay: f"{replay.num_preemptions:,}",
        "recomputed": lambda replay: f"{1 - workload.num_tokens / replay.num_computed_tokens:.1%}",
    }
    return f"## {workload.title}\n\n{table_of(workload.replays, columns)}"


def verdict(workload: Workload, *, block_size: int) -> str:
    """What the paged scheme gains over the contiguous ones, and the bars it must reach."""
    paged = next(item for item in workload.paged if item.scheme.endswith(f" {block_size}"))
    gains = [
        f"Against {item.scheme}: {paged.num_held / item.num_held:.1f} times the sequences at once, "
        f"{paged.mean_running / item.mean_running:.1f} times on average."
        for item in workload.contiguous
    ]
    waste = f"{paged.waste:.2%} of the allocated slots are empty (bar: under 4 %)."
    bars = "Bars for sequences at once: 4 times max length, 2 times prompt + max_tokens."
    return "\n".join([f"Paged in blocks of {block_size}: {waste}", *gains, bars])


_FIGURES = (
    "num_slots", "waste", "utilisation", "num_held", "mean_running", "num_steps",
    "num_preemptions", "num_computed_tokens", "num_finished",
)  # fmt: skip


def figures(workload: Workload) -> dict[str, Any]:
    """The workload's figures as plain data."""
    schemes = {
        replay.scheme: {name: getattr(replay, name) for name in _FIGURES}
        for replay in workload.replays
    }
    return {"title": workload.title, "schemes": schemes}


# -- the picture ------------------------------------------------------------------------------


def draw(workloads: Sequence[Workload], block_size: int, path: Path) -> None:
    """Draw the first workload's pool over time per scheme, and the waste in all workloads. Raises
    ConfigError if matplotlib is not installed."""
    first = workloads[0]
    shown = [
        *first.contiguous,
        *(item for item in first.paged if item.scheme.endswith(f" {block_size}")),
    ]
    figure = new_figure(15, 8.5)
    figure.suptitle(f"KV memory in the same bytes\n{first.title}", x=0.01, ha="left", size=12)
    grid = figure.add_gridspec(2, 1, height_ratios=(1, 1.05))
    above = grid[0].subgridspec(1, len(shown))
    below = grid[1].subgridspec(1, 2, width_ratios=(1.25, 1))
    num_steps = max(replay.num_steps for replay in shown)
    for column, replay in enumerate(shown):
        axes = figure.add_subplot(above[column])
        _draw_pool(axes, replay, num_steps)
        if column == 0:
            axes.set_ylabel("share of the pool's token slots (%)")
        else:
            axes.tick_params(labelleft=False)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper right", ncols=3)
    _draw_waste(figure.add_subplot(below[0]), workloads)
    _draw_sequences(figure.add_subplot(below[1]), first)
    figure.savefig(path, dpi=150)


def _draw_pool(axes: Axes, replay: Replay, num_steps: int) -> None:
    """One scheme's slots over time, stacked: used, allocated but empty, free."""
    width = -(-replay.num_steps // _MAX_POINTS)
    steps = list(range(0, replay.num_steps, width))
    scale = 100.0 / replay.num_slots
    used = [scale * _mean(replay.used[step : step + width]) for step in steps]
    allocated = [scale * _mean(replay.allocated[step : step + width]) for step in steps]
    axes.stackplot(
        steps,
        used,
        [total - part for total, part in zip(allocated, used, strict=True)],
        [100.0 - total for total in allocated],
        labels=("hold a token", "allocated but empty", "free"),
        colors=(BLUE, ORANGE, GREY),
        linewidth=0,
    )
    axes.set_title(
        f"{replay.scheme}\n{replay.waste:.1%} waste, {replay.mean_running:.0f} running, "
        f"{replay.num_steps:,} steps"
    )
    axes.set_xlim(0, num_steps)
    axes.set_ylim(0, 100)
    axes.set_xlabel("step (a token for every running sequence)")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.locator_params(axis="x", nbins=4)


def _draw_waste(axes: Axes, workloads: Sequence[Workload]) -> None:
    names = [replay.scheme for replay in workloads[0].replays]
    width = 0.8 / len(workloads)
    for index, (workload, colour) in enumerate(zip(workloads, (BLUE, SKY, GREEN), strict=False)):
        places = [place + (index - (len(workloads) - 1) / 2) * width for place in range(len(names))]
        wastes = [100.0 * replay.waste for replay in workload.replays]
        bars = axes.bar(places, wastes, width, label=workload.label, color=colour)
        axes.bar_label(bars, fmt="%.1f", padding=2, size=7)
    axes.axhline(4.0, color=ORANGE, linestyle="--", linewidth=1, zorder=0, label="4 %")
    axes.set_title("Waste: empty ÷ allocated slots of running sequences")
    axes.set_ylabel("waste (%)")
    axes.set_xticks(range(len(names)), [name.replace(" ", "\n", 1) for name in names])
    axes.legend(loc="upper right")


def _draw_sequences(axes: Axes, workload: Workload) -> None:
    names = [replay.scheme for replay in workload.replays]
    held = [replay.num_held for replay in workload.replays]
    mean = [replay.mean_running for replay in workload.replays]
    places = range(len(names))
    for offset, values, label, colour in (
        (-0.2, held, "held at once before the first preemption", BLUE),
        (0.2, mean, "running, mean over steps", SKY),
    ):
        bars = axes.barh([place + offset for place in places], values, 0.4, label=label,
                         color=colour)  # fmt: skip
        axes.bar_label(bars, fmt="{:,.0f}", padding=3, size=8)
    axes.set_title(f"Sequences in the same bytes ({workload.label})")
    axes.set_xlabel("sequences")
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.legend(loc="upper right")


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values)
