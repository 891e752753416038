"""`penstock bench policy`: the cost of planning a step in plain Python, without a device.

Every sequence decodes one token a step; prompts are staggered so that in each step one in
`block_size` sequences needs a new block. Only `schedule()` and `update()` are timed.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from penstock.engine.batch import Batch, BatchResult
from penstock.engine.blocks import BlockManager
from penstock.engine.config import SchedulerConfig
from penstock.engine.request import Request, SamplingParams
from penstock.engine.scheduling import Scheduler
from penstock.load.report.options import add_out, counts, positive
from penstock.load.report.tables import publish, table

_BAR_MS, _BAR_SEQUENCES, _BAR_BLOCKS = 2.0, 256, 100_000
_WARM_UP_STEPS = 32
_VOCAB_SIZE = 50_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyCost:
    """Milliseconds per step; medians, except `p99_ms`."""

    num_sequences: int
    num_blocks: int
    schedule_ms: float
    update_ms: float
    total_ms: float
    p99_ms: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--sequences",
        type=counts,
        default="32,64,128,256,512,1024",
        help="numbers of sequences, comma-separated",
    )
    add(
        "--num-blocks",
        type=counts,
        default="1000,10000,100000,1000000",
        help="pool sizes, comma-separated",
    )
    add("--block-size", type=positive, default=16, help="tokens per block")
    add("--prompt-tokens", type=positive, default=96, help="tokens of the shortest prompt")
    add("--steps", type=positive, default=300, help="timed steps per cell")
    add(
        "--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True,
        help="hash blocks as they fill",
    )  # fmt: skip
    add_out(parser)


def run(parsed: argparse.Namespace) -> int:
    """Time every pool with every number of sequences that fits; print and write the table."""
    costs = [
        measure(num_sequences, num_blocks, parsed)
        for num_blocks in parsed.num_blocks
        for num_sequences in parsed.sequences
        if _num_blocks_needed(num_sequences, parsed) <= num_blocks
    ]
    report = "\n\n".join([_tables(costs, parsed.num_blocks, parsed.sequences), _verdict(costs)])
    data = {"costs": [asdict(cost) for cost in costs]}
    publish(parsed.out, "policy", "Cost of planning a step", report, data)
    return 0


def measure(num_sequences: int, num_blocks: int, parsed: argparse.Namespace) -> PolicyCost:
    """Time one cell of the table: all sequences decode, none ends and none is preempted."""
    scheduler = _decoding(num_sequences, num_blocks, parsed)
    schedules, updates = [], []
    for step in range(_WARM_UP_STEPS + parsed.steps):
        began_s = time.perf_counter()
        batch = scheduler.schedule()
        scheduled_s = time.perf_counter()
        result = _sample(batch)
        sampled_s = time.perf_counter()
        scheduler.update(batch, result)
        updated_s = time.perf_counter()
        assert len(batch.scheduled) == num_sequences, "somebody did not decode"
        if step >= _WARM_UP_STEPS:
            schedules.append(1e3 * (scheduled_s - began_s))
            updates.append(1e3 * (updated_s - sampled_s))
    totals = [plan + take for plan, take in zip(schedules, updates, strict=True)]
    return PolicyCost(
        num_sequences=num_sequences,
        num_blocks=num_blocks,
        schedule_ms=statistics.median(schedules),
        update_ms=statistics.median(updates),
        total_ms=statistics.median(totals),
        p99_ms=sorted(totals)[int(0.99 * len(totals))],
    )


def _decoding(num_sequences: int, num_blocks: int, parsed: argparse.Namespace) -> Scheduler:
    """A scheduler whose sequences have all computed their prompts."""
    blocks = BlockManager(
        num_blocks=num_blocks,
        block_size=parsed.block_size,
        enable_prefix_caching=parsed.enable_prefix_caching,
    )
    max_model_len = _num_tokens(parsed.block_size - 1, parsed) + 1
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=num_sequences, max_num_batched_tokens=num_sequences * max_model_len
        ),
        blocks,
        eos_token_ids=(),
        max_model_len=max_model_len,
    )
    rng = random.Random(0)
    for index in range(num_sequences):
        length = parsed.prompt_tokens + index % parsed.block_size
        scheduler.add(
            Request(
                request_id=str(index),
                prompt_token_ids=tuple(rng.choices(range(_VOCAB_SIZE), k=length)),
                sampling_params=SamplingParams(max_tokens=max_model_len),
            )
        )
    while scheduler.num_running < num_sequences:
        batch = scheduler.schedule()
        scheduler.update(batch, _sample(batch))
    return scheduler


def _sample(batch: Batch) -> BatchResult:
    """A token for every sequence; tokens differ by sequence, so that no two share a block."""
    return BatchResult(
        step=batch.step, token_ids={item.seq_id: (item.seq_id,) for item in batch.scheduled}
    )


def _num_tokens(stagger: int, parsed: argparse.Namespace) -> int:
    """The most tokens that a sequence has at the end of the measurement."""
    return int(parsed.prompt_tokens + stagger + _WARM_UP_STEPS + parsed.steps + 1)


def _num_blocks_needed(num_sequences: int, parsed: argparse.Namespace) -> int:
    """Blocks for all sequences to the end, with what admission keeps free."""
    longest = -(-_num_tokens(parsed.block_size, parsed) // parsed.block_size)
    return num_sequences * int(longest) * 21 // 20


def _tables(costs: Sequence[PolicyCost], pools: Sequence[int], sequences: Sequence[int]) -> str:
    by_cell = {(cost.num_sequences, cost.num_blocks): cost for cost in costs}
    texts: dict[str, Callable[[PolicyCost], str]] = {
        "Milliseconds per step of schedule() + update(), median / 99th percentile:": (
            lambda cost: f"{cost.total_ms:.2f} / {cost.p99_ms:.2f}"
        ),
        "Of these, schedule() / update(), medians:": (
            lambda cost: f"{cost.schedule_ms:.2f} / {cost.update_ms:.2f}"
        ),
    }
    header = ["sequences", *(f"{pool:,} blocks" for pool in pools)]
    sections = []
    for title, text in texts.items():
        cells = {count: [by_cell.get((count, pool)) for pool in pools] for count in sequences}
        rows = [
            [f"{count:,}", *(text(cost) if cost else "–" for cost in row)]
            for count, row in cells.items()
        ]
        sections.append(f"{title}\n\n{table(header, rows)}")
    return "\n\n".join([*sections, "–: the pool does not hold so many to the end."])


def _verdict(costs: Sequence[PolicyCost]) -> str:
    bar = f"Bar: {_BAR_MS:g} ms for {_BAR_SEQUENCES} sequences and {_BAR_BLOCKS:,} blocks"
    for cost in costs:
        if (cost.num_sequences, cost.num_blocks) == (_BAR_SEQUENCES, _BAR_BLOCKS):
            return f"{bar}; measured {cost.total_ms:.2f} ms."
    return f"{bar}; not measured."
