"""A run's figures as tables that read alike in a terminal and in Markdown, and what to doubt."""

from __future__ import annotations

import math
from collections.abc import Iterator

from penstock.load.report.summary import Quantiles, ServerMetrics, Summary
from penstock.load.report.tables import table

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
        [[name, *_cells(quantiles)] for name, quantiles in rows.items()],
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


def notes(summary: Summary, server: ServerMetrics | None) -> str:
    """One line a fact."""
    return "\n".join(
        f"- {line}" for line in [*_run_notes(summary), *_server_notes(server), *_faults(summary)]
    )


def warnings(summary: Summary, *, has_cap: bool) -> list[str]:
    """Why the figures may be the client's rather than the server's.

    Args:
        has_cap: requests may wait for others to end before they are sent; then lag is no fault.
    """
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


def _server_notes(server: ServerMetrics | None) -> Iterator[str]:
    if server is None:
        return
    if server.prefix_cache_hit_rate is not None:
        yield f"server: prefix cache hit rate {server.prefix_cache_hit_rate:.1%}"
    if server.num_preemptions is not None:
        yield f"server: {server.num_preemptions:,} preemptions"
    if server.peak_kv_usage is not None:
        yield f"server: KV cache in use, highest sample {server.peak_kv_usage:.1%}"
    if server.kv_waste is not None:
        yield f"server: KV slots allocated but empty {server.kv_waste:.1%}"


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


def _cells(quantiles: Quantiles) -> list[str]:
    values = (quantiles.mean, quantiles.p50, quantiles.p90, quantiles.p99)
    return ["–" if math.isnan(value) else f"{value:,.1f}" for value in values]
