"""The figures of a run, defined as in `vllm bench serve`, and their tables.

    TTFT    from the scheduled time to the first event that brought text
    ITL     between two such events of a stream, however many tokens the later one brought
    E2E     from the scheduled time to the last such event (before the terminal event)
    TPOT    (E2E − TTFT) ÷ (output tokens − 1), of requests with two tokens or more
    rates   over the run, from its start to the end of its last request

An event without text (a role, an empty delta) is no first token. A request with a fault counts only
in the counts, the faults, the peak and the send lag.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from penstock.load.client.records import StreamRecord
from penstock.load.report.tables import table
from penstock.load.workloads.driver import RunResult


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Quantiles of a sample; NaN if it is empty."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quantiles:
        if not values:
            return cls(math.nan, math.nan, math.nan, math.nan)
        p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
        return cls(float(np.mean(values)), p50, p90, p99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """The limits of a good request; None: no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    @property
    def is_set(self) -> bool:
        return self != Slo()

    def holds(self, record: StreamRecord) -> bool:
        """Whether a request keeps the limits. A failed one never does; an answer of one token
        has a TPOT of 0."""
        if not record.is_clean or not record.event_times_s:
            return False
        pairs = (
            (self.ttft_ms, ttft_ms(record)),
            (self.tpot_ms, tpot_ms(record) or 0.0),
            (self.e2e_ms, e2e_ms(record)),
        )
        return all(limit is None or value <= limit for limit, value in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Requests within the objectives."""

    share: float  # of all requests sent
    requests_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One run.

    Prompt, cached and output tokens are those of completed requests as the server counts them;
    where it does not, prompt and cached tokens are 0 and output tokens are counted from the
    events. `send_lag_ms` is from due to sent; without a limit on concurrency it is the client's
    fault.
    """

    num_requests: int
    num_completed: int
    num_failed: int
    num_unsent: int  # turns not sent, because one before them failed
    num_without_text: int  # completed, but with no text to time
    duration_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    tokens_per_event: float  # more than 1 means that ITL is of several tokens
    peak_concurrency: int  # most requests in flight at any moment
    ttft_ms: Quantiles
    itl_ms: Quantiles
    tpot_ms: Quantiles
    e2e_ms: Quantiles
    send_lag_ms: Quantiles
    goodput: Goodput | None  # None without objectives
    faults: Mapping[str, int]  # requests by kind; one may have several
    fault_details: Mapping[str, str]  # the first words of each kind
    client_cpu_share: float  # share of one core that this process used

    def to_json(self) -> dict[str, Any]:
        """Plain data, with NaN as null."""
        plain: dict[str, Any] = _without_nan(asdict(self))
        return plain


def summarize(result: RunResult, slo: Slo | None = None) -> Summary:
    """The figures of a run, with goodput if there are objectives."""
    records = result.records
    clean = [record for record in records if record.is_clean]
    timed = [record for record in clean if record.event_times_s]
    duration_s = max(result.duration_s, 1e-9)  # an empty run has none
    num_output = sum(map(num_output_tokens, clean))
    num_prompt = sum(max(record.prompt_tokens, 0) for record in clean)
    num_good = sum(map(slo.holds, records)) if slo else 0
    num_events = sum(len(record.event_times_s) for record in timed)
    return Summary(
        num_requests=len(records),
        num_completed=len(clean),
        num_failed=len(records) - len(clean),
        num_unsent=result.num_unsent,
        num_without_text=len(clean) - len(timed),
        duration_s=result.duration_s,
        num_prompt_tokens=num_prompt,
        num_cached_tokens=sum(max(record.cached_tokens, 0) for record in clean),
        num_output_tokens=num_output,
        requests_per_s=len(clean) / duration_s,
        output_tokens_per_s=num_output / duration_s,
        total_tokens_per_s=(num_prompt + num_output) / duration_s,
        tokens_per_event=sum(map(num_output_tokens, timed)) / max(num_events, 1),
        peak_concurrency=_peak(records),
        ttft_ms=Quantiles.of([ttft_ms(record) for record in timed]),
        itl_ms=Quantiles.of([gap for record in timed for gap in itls_ms(record)]),
        tpot_ms=Quantiles.of([tpot for r in timed if (tpot := tpot_ms(r)) is not None]),
        e2e_ms=Quantiles.of([e2e_ms(record) for record in timed]),
        send_lag_ms=Quantiles.of([1e3 * (each.sent_s - each.scheduled_s) for each in records]),
        goodput=Goodput(share=num_good / max(len(records), 1), requests_per_s=num_good / duration_s)
        if slo and slo.is_set
        else None,
        faults=dict(Counter(str(fault) for record in records for fault in record.faults)),
        fault_details=_details(records),
        client_cpu_share=result.client_cpu_s / duration_s,
    )


# -- of one request ---------------------------------------------------------------------------


def ttft_ms(record: StreamRecord) -> float:
    return 1e3 * (record.event_times_s[0] - record.scheduled_s)


def e2e_ms(record: StreamRecord) -> float:
    return 1e3 * (record.event_times_s[-1] - record.scheduled_s)


def itls_ms(record: StreamRecord) -> list[float]:
    return [1e3 * (later - earlier) for earlier, later in pairwise(record.event_times_s)]


def tpot_ms(record: StreamRecord) -> float | None:
    """None for an answer of one token."""
    num_tokens = num_output_tokens(record)
    return (e2e_ms(record) - ttft_ms(record)) / (num_tokens - 1) if num_tokens > 1 else None


def num_output_tokens(record: StreamRecord) -> int:
    """As the server counts them; else as its events state; else one per event."""
    if record.output_tokens >= 0:
        return record.output_tokens
    return sum(record.event_tokens) or len(record.event_times_s)


# -- of all -----------------------------------------------------------------------------------


def _peak(records: Iterable[StreamRecord]) -> int:
    """The most requests in flight; one that ends when another is sent counts as ended before."""
    changes = [(record.sent_s, 1) for record in records]
    changes += [(record.ended_s, -1) for record in records]
    peak = num_in_flight = 0
    for _, change in sorted(changes):
        num_in_flight += change
        peak = max(peak, num_in_flight)
    return peak


def _details(records: Iterable[StreamRecord]) -> dict[str, str]:
    details: dict[str, str] = {}
    for record in records:
        for fault in record.faults:
            details.setdefault(str(fault), record.detail)
    return details


def _without_nan(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_nan(item) for name, item in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value


# -- turns of conversations ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnTimes:
    """The same turn of all conversations: medians."""

    turn: int
    prompt_tokens: float
    new_tokens: float  # of the prompt, those that were not cached, as the server says
    ttft_ms: float


def turns_of(records: Sequence[StreamRecord]) -> list[TurnTimes]:
    """By turn; empty unless there are several."""
    turns: dict[int, list[StreamRecord]] = {}
    for record in records:
        if record.is_clean and record.event_times_s:
            turns.setdefault(record.turn, []).append(record)
    median = statistics.median
    found = [
        TurnTimes(
            turn=turn + 1,
            prompt_tokens=median(each.prompt_tokens for each in group),
            new_tokens=median(each.prompt_tokens - max(each.cached_tokens, 0) for each in group),
            ttft_ms=median(map(ttft_ms, group)),
        )
        for turn, group in sorted(turns.items())
    ]
    return found if len(found) > 1 else []


# -- tables and notes ----------------------------------------------------------------------------

_BUSY_CLIENT = 0.7  # of a core
_LATE_MS = 10.0


def latency_table(summary: Summary) -> str:
    rows = {
        "TTFT": summary.ttft_ms,
        "ITL": summary.itl_ms,
        "TPOT": summary.tpot_ms,
        "E2E": summary.e2e_ms,
    }
    return table(
        ("ms", "mean", "p50", "p90", "p99"),
        [
            [name, *("–" if math.isnan(value) else f"{value:,.1f}" for value in astuple(quantiles))]
            for name, quantiles in rows.items()
        ],
    )


def rate_table(summary: Summary) -> str:
    header = ["", "in all", "per second"]
    rows = [
        ["requests", f"{summary.num_completed:,}", f"{summary.requests_per_s:,.2f}"],
        ["output tokens", f"{summary.num_output_tokens:,}", f"{summary.output_tokens_per_s:,.1f}"],
        [
            "prompt and output tokens",
            f"{summary.num_prompt_tokens + summary.num_output_tokens:,}",
            f"{summary.total_tokens_per_s:,.1f}",
        ],
    ]
    if summary.goodput is not None:
        good = summary.goodput
        num_good = round(good.share * summary.num_requests)
        rows.append(["good requests", f"{num_good:,}", f"{good.requests_per_s:,.2f}"])
    return table(header, rows)


def notes(summary: Summary) -> str:
    """One line per fact."""
    return "\n".join(f"- {line}" for line in [*_run_notes(summary), *_faults(summary)])


def warnings(summary: Summary, *, has_cap: bool) -> list[str]:
    """Why the figures may be limited by the client rather than the server; with `has_cap`,
    requests may wait for others to end, and lag is no fault."""
    found = []
    if summary.client_cpu_share > _BUSY_CLIENT:
        found.append(
            f"this client used {summary.client_cpu_share:.0%} of a core: it may be the bottleneck"
        )
    if summary.send_lag_ms.p99 > _LATE_MS and not has_cap:
        found.append(
            f"1 % of the requests were sent {summary.send_lag_ms.p99:.0f} ms late or more: this "
            "client could not keep the times of the workload; latencies include that"
        )
    return found


def _run_notes(summary: Summary) -> Iterator[str]:
    yield (
        f"{summary.duration_s:.1f} s, at most {summary.peak_concurrency:,} requests in flight, "
        f"{summary.tokens_per_event:.2f} tokens an event"
    )
    if summary.num_cached_tokens:
        share = summary.num_cached_tokens / max(summary.num_prompt_tokens, 1)
        yield f"cached prompt tokens: {summary.num_cached_tokens:,} ({share:.1%})"
    if summary.goodput is not None:
        yield f"within the objectives: {summary.goodput.share:.1%} of all requests"
    if summary.num_without_text:
        yield f"{summary.num_without_text:,} answers had no text and are in no latency"
    yield (
        f"client: {summary.client_cpu_share:.0%} of a core; sent {summary.send_lag_ms.p50:.1f} ms "
        f"(p99 {summary.send_lag_ms.p99:.1f}) after due"
    )


def _faults(summary: Summary) -> Iterator[str]:
    if not summary.num_failed:
        yield "no stream had a fault"
        return
    yield (
        f"{summary.num_failed:,} of {summary.num_requests:,} requests had a fault, and are in no "
        f"figure above; {summary.num_unsent:,} turns after them were not sent"
    )
    for fault, num in summary.faults.items():
        yield f"{fault} ×{num:,}: {summary.fault_details[fault]}"
