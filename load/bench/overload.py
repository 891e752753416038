"""`penstock bench overload`: the cost of preemption when the KV pool cannot hold all sequences.

The same greedy requests, submitted at once, go through engine cores in this process:

    unpressed    as many at once as the pool surely holds
    pressed      `--overload` times as many at once in the same pool, with each kind of preemption
    roomy        as many as pressed, in a pool that holds them all

Every run must give each request the same tokens as the unpressed run.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from penstock.engine.config import (
    DEMO_MODEL,
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    PreemptionMode,
    SchedulerConfig,
)
from penstock.engine.engine_core import EngineCore
from penstock.engine.startup import build_core
from penstock.engine.transport.messages import EngineInfo
from penstock.load.engine_runs import greedy_request
from penstock.load.report.options import add_out, positive
from penstock.load.report.tables import publish, table

_BAR = 0.8
_PROMPT_TOKENS, _OUTPUT_TOKENS = (32, 96), (96, 160)  # shortest and longest
_NOTES = """\
at once: sequences that may run. pool: KV blocks. tokens/s: output tokens, median of the repeats;
all else is of the last repeat. fallbacks: victims recomputed because the host tier was full.
MiB out, in: KV moved to host memory and back, of parked sequences and, with prefix caching, of
cached blocks whose place was needed. longest gap: between two tokens of one stream.
other tokens: requests whose tokens are not those of the unpressed run (must be 0)."""


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    num_blocks: int
    max_num_seqs: int
    preemption: PreemptionMode = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    tokens: tuple[tuple[int, ...], ...]  # by request, in order of submission
    elapsed_s: float
    longest_gap_s: float  # between two tokens of one stream
    num_swaps: int
    num_recomputes: int
    num_fallbacks: int
    swapped_out_bytes: int
    swapped_in_bytes: int

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.tokens)) / self.elapsed_s


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default=DEMO_MODEL, help="a directory or a Hub id")
    add("--dtype", default="float32", help="lower precision may change tokens at near ties")
    add("--device", default="auto", choices=("auto", "cpu", "cuda"), help="where to run")
    add("--num-threads", type=int, default=0, help="CPU threads; 0: the engine's choice")
    add("--concurrency", type=positive, default=8, help="sequences that the pool holds")
    add("--overload", type=positive, default=4, help="factor of sequences when pressed")
    add("--requests", type=int, default=0, help="total requests; 0: as many as are pressed")
    add(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="dropped blocks may then be found again in either tier",
    )
    add("--repeat", type=positive, default=3, help="runs of each case, in turn")
    add("--seed", type=int, default=0, help="seed of the requests")
    add_out(parser)


def run(parsed: argparse.Namespace) -> int:
    """Run every case; print and write the table; return 1 if any request got other tokens."""
    num_pressed = parsed.concurrency * parsed.overload
    lengths = _lengths(parsed.requests or num_pressed, parsed.seed)
    cases = _cases(parsed.concurrency, num_pressed, lengths)
    num_host_blocks = sum(map(_num_blocks, lengths))  # recomputing is then always a choice
    _run_case(cases[0], lengths[:2], num_host_blocks, parsed)  # the first run in a process is slow
    outcomes: dict[Case, list[Outcome]] = {case: [] for case in cases}
    for _ in range(parsed.repeat):
        for case in cases:
            outcomes[case].append(_run_case(case, lengths, num_host_blocks, parsed))
    report = "\n\n".join([_table(outcomes), _verdict(outcomes), _NOTES])
    data = {"cases": [_figures(case, outcomes[case]) for case in cases]}
    publish(parsed.out, "overload", "More sequences than the KV pool holds", report, data)
    unpressed = outcomes[cases[0]][0]
    return int(any(_num_other(each, unpressed) for runs in outcomes.values() for each in runs))


def _lengths(num_requests: int, seed: int) -> list[tuple[int, int]]:
    """Prompt and output tokens of each request."""
    rng = random.Random(seed)
    return [
        (rng.randint(*_PROMPT_TOKENS), rng.randint(*_OUTPUT_TOKENS)) for _ in range(num_requests)
    ]


def _num_blocks(length: tuple[int, int]) -> int:
    return -(-sum(length) // CacheConfig().block_size)


def _cases(concurrency: int, num_pressed: int, lengths: Sequence[tuple[int, int]]) -> list[Case]:
    longest = max(map(_num_blocks, lengths))

    def pool(num_sequences: int) -> int:
        # Admission spares up to a block for every second sequence.
        return num_sequences * longest + num_sequences

    small = pool(concurrency)
    return [
        Case("unpressed", small, concurrency),
        Case("pressed, swap", small, num_pressed, "swap"),
        Case("pressed, recompute", small, num_pressed, "recompute"),
        Case("pressed, auto", small, num_pressed, "auto"),
        Case("roomy", pool(num_pressed), num_pressed),
    ]


def _run_case(
    case: Case, lengths: Sequence[tuple[int, int]], num_host_blocks: int, parsed: argparse.Namespace
) -> Outcome:
    core, info = build_core(
        EngineConfig(
            model=ModelConfig(
                model=parsed.model,
                dtype=parsed.dtype,
                max_model_len=_PROMPT_TOKENS[1] + _OUTPUT_TOKENS[1],
            ),
            cache=CacheConfig(
                num_blocks=case.num_blocks,
                num_host_blocks=num_host_blocks,
                enable_prefix_caching=parsed.enable_prefix_caching,
            ),
            scheduler=SchedulerConfig(max_num_seqs=case.max_num_seqs, preemption=case.preemption),
            device=DeviceConfig(device=parsed.device, num_threads=parsed.num_threads or None),
        )
    )
    try:
        rng = random.Random(parsed.seed)
        for index, (num_prompt, num_output) in enumerate(lengths):
            prompt = rng.choices(range(info.vocab_size), k=num_prompt)
            core.add(greedy_request(index, prompt, num_output))
        return _drain(core, info, len(lengths))
    finally:
        core.close()


def _drain(core: EngineCore, info: EngineInfo, num_requests: int) -> Outcome:
    """Step until all have ended."""
    tokens: defaultdict[str, list[int]] = defaultdict(list)
    heard_s: dict[str, float] = {}
    longest_gap_s = 0.0
    began_s = time.perf_counter()
    while core.has_work():
        outputs = core.step()
        now_s = time.perf_counter()
        for output in outputs:
            if output.token_ids:
                tokens[output.request_id] += output.token_ids
                gap_s = now_s - heard_s.get(output.request_id, now_s)
                longest_gap_s = max(longest_gap_s, gap_s)
                heard_s[output.request_id] = now_s
    counters, blocks = core.scheduler.counters, core.scheduler.blocks.counters
    return Outcome(
        tokens=tuple(tuple(tokens[str(index)]) for index in range(num_requests)),
        elapsed_s=time.perf_counter() - began_s,
        longest_gap_s=longest_gap_s,
        num_swaps=counters.num_swaps,
        num_recomputes=counters.num_recomputes,
        num_fallbacks=counters.num_fallbacks,
        swapped_out_bytes=blocks.num_swapped_out * info.bytes_per_block,
        swapped_in_bytes=blocks.num_swapped_in * info.bytes_per_block,
    )


# -- what is said of it -----------------------------------------------------------------------


def _speed(outcomes: Sequence[Outcome]) -> float:
    return statistics.median(outcome.tokens_per_s for outcome in outcomes)


def _num_other(outcome: Outcome, expected: Outcome) -> int:
    return sum(got != want for got, want in zip(outcome.tokens, expected.tokens, strict=True))


def _table(outcomes: dict[Case, list[Outcome]]) -> str:
    unpressed, *_ = outcomes.values()
    rows = []
    for case, runs in outcomes.items():
        last, speed = runs[-1], _speed(runs)
        counts = (last.num_swaps, last.num_recomputes, last.num_fallbacks)
        moved = (last.swapped_out_bytes, last.swapped_in_bytes)
        rows.append(
            [
                *(case.name, f"{case.max_num_seqs:,}", f"{case.num_blocks:,}"),
                *(f"{speed:,.0f}", f"{speed / _speed(unpressed):.2f}"),
                *(f"{count:,}" for count in counts),
                *(f"{size / (1 << 20):,.1f}" for size in moved),
                f"{1e3 * last.longest_gap_s:,.0f}",
                f"{max(_num_other(run, unpressed[0]) for run in runs)}",
            ]
        )
    header = ("run", "at once", "pool", "tokens/s", "of unpressed", "swaps", "recomputes",
              "fallbacks", "MiB out", "MiB in", "longest gap ms", "other tokens")  # fmt: skip
    return table(header, rows)


def _verdict(outcomes: dict[Case, list[Outcome]]) -> str:
    speeds = {case.name: _speed(runs) for case, runs in outcomes.items()}
    ratio = speeds["pressed, swap"] / speeds["unpressed"]
    return (
        f"Pressed with swap keeps {ratio:.2f} of the unpressed speed (bar: {_BAR:g}) and "
        f"{speeds['pressed, swap'] / speeds['roomy']:.2f} of what a roomy pool gives."
    )


def _figures(case: Case, runs: Sequence[Outcome]) -> dict[str, object]:
    last = asdict(runs[-1])
    del last["tokens"]
    return {**asdict(case), **last, "tokens_per_s": [each.tokens_per_s for each in runs]}
