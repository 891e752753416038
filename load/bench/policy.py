"""`penstock bench policy`: what planning a step costs in plain Python, without a device.

Every sequence decodes one token a step; prompts are staggered so that one in `block_size` of them
takes a block in each. Timed are `schedule()` and `update()`; what a device would do is left out.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
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
    """Milliseconds per step, medians but for `p99_ms`."""

    num_sequences: int
    num_blocks: int
    schedule_ms: float
    update_ms: float
    total_ms: float
    p99_ms: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--sequences", type=counts, default="32,64,128,256,512,1024", help="with commas")
    add("--num-blocks", type=counts, default="1000,10000,100000,1000000", help="pools, with commas")
    add("--block-size", type=positive, default=16, help="tokens in a block")
    add("--prompt-tokens", type=positive, default=96, help="of the shortest prompt")
    add("--steps", type=positive, default=300, help="timed for every cell")
    add(
        "--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True,
        help="hash blocks as they fill",
    )  # fmt: skip
    add_out(parser)


def run(parsed: argparse.Namespace) -> int:
    """Time every pool with every number of sequences it holds; print and write the table; 0."""
    costs = [
        measure(num_sequences, num_blocks, parsed)
        for num_blocks in parsed.num_blocks
        for num_sequences in parsed.sequences
        if _num_blocks_needed(num_sequences, parsed) <= num_blocks
    ]
    report = "\n\n".join([_tables(costs, parsed.num_blocks, parsed.sequences), _verdict(costs)])
    print(report)
    publish(
        parsed.out,
        "policy",
        title="Cost of planning a step",
        report=report,
        data={"costs": [asdict(cost) for cost in costs]},
    )
    return 0


def measure(num_sequences: int, num_blocks: int, parsed: argparse.Namespace) -> PolicyCost:
    """Time one cell of the table: all sequences decode at once, none ends, none is preempted."""
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
    """A scheduler whose sequences all have their prompts behind them."""
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
    """A token for every sequence; they differ by sequence, so that no two share a block."""
    return BatchResult(
        step=batch.step, token_ids={item.seq_id: (item.seq_id,) for item in batch.scheduled}
    )


def _num_tokens(stagger: int, parsed: argparse.Namespace) -> int:
    """Tokens of a sequence at the end of the measurement, at most."""
    return int(parsed.prompt_tokens + stagger + _WARM_UP_STEPS + parsed.steps + 1)


def _num_blocks_needed(num_sequences: int, parsed: argparse.Namespace) -> int:
    """Blocks for all sequences to the end, with room for what admission keeps free."""
    longest = -(-_num_tokens(parsed.block_size, parsed) // parsed.block_size)
    return num_sequences * int(longest) * 21 // 20


def _tables(costs: Sequence[PolicyCost], pools: Sequence[int], sequences: Sequence[int]) -> str:
    by_cell = {(cost.num_sequences, cost.num_blocks): cost for cost in costs}
    header = ["sequences", *(f"{pool:,} blocks" for pool in pools)]
    sections = []
    for title, text in (
        ("Milliseconds per step of schedule() + update(), median / 99th percentile:", _total),
        ("Of these, schedule() / update(), medians:", _parts),
    ):
        rows = [
            [
                f"{count:,}",
                *(
                    text(by_cell[count, pool]) if (count, pool) in by_cell else "–"
                    for pool in pools
                ),
            ]
            for count in sequences
        ]
        sections.append(f"{title}\n\n{table(header, rows)}")
    return "\n\n".join([*sections, "–: the pool does not hold so many to the end."])


def _total(cost: PolicyCost) -> str:
    return f"{cost.total_ms:.2f} / {cost.p99_ms:.2f}"


def _parts(cost: PolicyCost) -> str:
    return f"{cost.schedule_ms:.2f} / {cost.update_ms:.2f}"


def _verdict(costs: Sequence[PolicyCost]) -> str:
    bar = f"Bar: {_BAR_MS:g} ms for {_BAR_SEQUENCES} sequences and {_BAR_BLOCKS:,} blocks"
    for cost in costs:
        if (cost.num_sequences, cost.num_blocks) == (_BAR_SEQUENCES, _BAR_BLOCKS):
            return f"{bar}; measured {cost.total_ms:.2f} ms."
    return f"{bar}; not measured."
