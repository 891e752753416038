"""Asks a system that is ready one workload after the other, and notes what each gave and took."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from penstock.load.peers import workloads
from penstock.load.peers.cells import Observation
from penstock.load.peers.rival import Running, Setting, cpu_s, memory_bytes
from penstock.load.processes import family
from penstock.load.report.summary import summarize, ttft_ms
from penstock.load.workloads.driver import RunResult


@dataclass(frozen=True, slots=True)
class Start:
    """Which start of which system it is; `pair` as of an `Observation`."""

    model: str
    system: str
    round: int
    pair: str


def observe(
    running: Running, start: Start, setting: Setting, names: Sequence[str]
) -> Iterator[Observation]:
    """Every workload once, after a short one that counts for nothing.

    Raises:
        RivalError: the system ended, or took too long. What came before it stands.
    """
    idle_bytes = memory_bytes(family(running.process))
    asked = [workloads.make(name, start.model) for name in names]
    running.measure(workloads.warm_up(start.model, max(each.concurrency for each in asked)))
    for workload in asked:
        before = cpu_s(family(running.process))
        result = running.measure(workload)
        summary = summarize(result)
        took = _per_1k(before, cpu_s(family(running.process)), summary.num_output_tokens)
        yield Observation(
            model=start.model,
            workload=workload.name,
            system=start.system,
            setting=setting.name,
            flags=str(setting),
            round=start.round,
            pair=start.pair,
            output_tokens_per_s=summary.output_tokens_per_s,
            ttft_ms_p50=summary.ttft_ms.p50,
            ttft_ms_p99=summary.ttft_ms.p99,
            itl_ms_p50=summary.itl_ms.p50,
            itl_ms_p99=summary.itl_ms.p99,
            turn_ttft_ms=_by_turn(result) if workload.endpoint == "chat" else (),
            cpu_s_per_1k_tokens=took,
            ready_s=running.ready_s,
            idle_memory_bytes=idle_bytes,
            num_cached_tokens=summary.num_cached_tokens,
            client_cpu_share=summary.client_cpu_share,
            faults=dict(summary.faults),
        )


def _by_turn(result: RunResult) -> tuple[float, ...]:
    turns: dict[int, list[float]] = {}
    for record in result.records:
        if record.is_clean and record.event_times_s:
            turns.setdefault(record.turn, []).append(ttft_ms(record))
    return tuple(statistics.median(turns[turn]) for turn in sorted(turns))


def _per_1k(
    before: Mapping[str, float], after: Mapping[str, float], num_tokens: int
) -> dict[str, float]:
    return {
        name: 1000 * (seconds - before.get(name, 0.0)) / max(num_tokens, 1)
        for name, seconds in after.items()
    }
