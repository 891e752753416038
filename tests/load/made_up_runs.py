"""Runs of made-up requests, whose figures are known beforehand."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.load.client.records import Fault, StreamRecord
from penstock.load.workloads.driver import RunResult

BEGAN_S = 500.0


def record(
    events_ms: Sequence[float],
    *,
    due_ms: float = 0.0,
    sent_ms: float | None = None,
    num_tokens: int | None = None,
    fault: Fault | None = None,
) -> StreamRecord:
    """Of a request with these events, in ms from the start of the run."""

    def at(time_ms: float) -> float:
        return BEGAN_S + time_ms / 1e3

    made = StreamRecord(
        scheduled_s=at(due_ms),
        sent_s=at(due_ms if sent_ms is None else sent_ms),
        event_times_s=[at(event_ms) for event_ms in events_ms],
        ended_s=at(events_ms[-1] + 1.0 if events_ms else due_ms),
        prompt_tokens=10,
        cached_tokens=4,
        output_tokens=len(events_ms) if num_tokens is None else num_tokens,
    )
    if fault:
        made.fault(fault, f"it was {fault}")
    return made


def result_of(*records: StreamRecord, seconds: float = 2.0, cpu_s: float = 0.1) -> RunResult:
    return RunResult(
        records=list(records), began_s=BEGAN_S, ended_s=BEGAN_S + seconds, client_cpu_s=cpu_s
    )
