"""Figures of made-up runs, each known beforehand, and what is said of them."""

from __future__ import annotations

import json
from dataclasses import astuple, replace

import numpy as np
import pytest

from penstock.load.client.records import Fault
from penstock.load.report.options import objective
from penstock.load.report.summary import (
    Goodput,
    Quantiles,
    Slo,
    latency_table,
    notes,
    summarize,
    warnings,
)

from .made_up_runs import BEGAN_S, record, result_of


def equal(quantiles: Quantiles, value: float) -> bool:
    return astuple(quantiles) == pytest.approx((value,) * 4)


# -- latencies --------------------------------------------------------------------------------


def test_one_request_by_hand() -> None:
    """Due at 100, sent at 120, events at 150, 180 and 210 of 4 tokens in all."""
    summary = summarize(result_of(record([150, 180, 210], due_ms=100, sent_ms=120, num_tokens=4)))
    assert equal(summary.ttft_ms, 50)
    assert equal(summary.itl_ms, 30)  # of events
    assert equal(summary.e2e_ms, 110)  # to the last text, not to what ends the stream
    assert equal(summary.tpot_ms, (110 - 50) / 3)
    assert equal(summary.send_lag_ms, 20)
    assert summary.tokens_per_event == pytest.approx(4 / 3)


def test_quantiles_are_over_requests_and_gaps_over_all_streams() -> None:
    ttfts_ms = [10.0 * number for number in range(1, 101)]
    summary = summarize(result_of(*(record([ttft, ttft + 2, ttft + 8]) for ttft in ttfts_ms)))
    assert astuple(summary.ttft_ms) == pytest.approx((505, 505, 901, 990.1))
    gaps_ms = [2.0, 6.0] * 100
    assert astuple(summary.itl_ms) == pytest.approx(
        (4.0, *np.percentile(gaps_ms, (50, 90, 99)).tolist())
    )
    assert equal(summary.tpot_ms, 4.0)


# -- counts and rates -------------------------------------------------------------------------


def test_rates_are_over_the_run() -> None:
    summary = summarize(result_of(record([1, 2, 3]), record([4, 5, 6]), seconds=4.0, cpu_s=1.0))
    assert summary.requests_per_s == 0.5
    assert summary.output_tokens_per_s == 1.5
    assert summary.total_tokens_per_s == 6.5
    assert summary.client_cpu_share == 0.25
    assert summary.num_cached_tokens == 8


def test_failed_requests_are_shown_and_left_out() -> None:
    good = [record([10, 20]), record([30, 40], due_ms=20)]
    bad = [record([9000], fault=Fault.CUT), record([], fault=Fault.REFUSED)]
    bad[0].fault(Fault.LOST_TOKENS)
    alone, mixed = summarize(result_of(*good)), summarize(result_of(*good, *bad))
    for name in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms", "output_tokens_per_s", "num_completed"):
        assert getattr(alone, name) == getattr(mixed, name)
    assert (mixed.num_requests, mixed.num_failed) == (4, 2)
    assert mixed.faults == {"cut": 1, "lost_tokens": 1, "refused": 1}
    assert mixed.fault_details["refused"] == "it was refused"


def test_peak_concurrency_is_of_any_moment() -> None:
    # In flight from sending to the terminal event, 1 ms after the last text.
    one_after_another = [record([begin + 9], due_ms=begin) for begin in (0, 10, 20)]
    assert summarize(result_of(*one_after_another)).peak_concurrency == 1
    overlapping = [record([begin + 14], due_ms=begin) for begin in (0, 10, 20)]
    assert summarize(result_of(*overlapping)).peak_concurrency == 2
    waiting = [replace(each, sent_s=BEGAN_S) for each in overlapping]
    assert summarize(result_of(*waiting)).peak_concurrency == 3


# -- goodput ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slo", "num_good"),
    [
        (Slo(ttft_ms=49.9), 1),
        (Slo(ttft_ms=50.1), 2),
        (Slo(tpot_ms=9.9), 1),
        (Slo(tpot_ms=10.1), 3),
        (Slo(e2e_ms=85), 1),
        (Slo(e2e_ms=96), 2),
        (Slo(ttft_ms=50.1, e2e_ms=85), 1),
        (Slo(ttft_ms=1, tpot_ms=1, e2e_ms=1), 0),
    ],
)
def test_goodput_counts_who_kept_to_every_objective(slo: Slo, num_good: int) -> None:
    records = (
        record([50, 60, 70, 80]),  # TTFT 50, TPOT 10, E2E 80
        record([10, 20, 95], num_tokens=11),  # 10, 8.5, 95
        record([70, 80, 90, 100]),  # 70, 10, 100
        record([1, 2], fault=Fault.STALLED),
    )
    assert summarize(result_of(*records), slo).goodput == Goodput(
        share=num_good / 4, requests_per_s=num_good / 2
    )


def test_objectives_read_as_in_vllm() -> None:
    assert dict(map(objective, ("ttft:200", "tpot:50.5", "e2e:3000"))) == {
        "ttft_ms": 200, "tpot_ms": 50.5, "e2e_ms": 3000
    }  # fmt: skip
    assert objective("e2el:7") == ("e2e_ms", 7)
    for text in ("ttft", "ttft:", "ttft:fast", "itl:3", "ttft:-1", "ttft:nan"):
        with pytest.raises(ValueError):
            objective(text)


# -- what is said -----------------------------------------------------------------------------


def test_a_run_without_any_success_is_plain_json() -> None:
    summary = summarize(result_of(record([], fault=Fault.UNREACHABLE)), Slo(ttft_ms=5))
    data = json.loads(json.dumps(summary.to_json(), allow_nan=False))
    assert data["ttft_ms"] == {"mean": None, "p50": None, "p90": None, "p99": None}
    assert data["faults"] == {"unreachable": 1}
    assert data["goodput"] == {"share": 0.0, "requests_per_s": 0.0}
    assert "| TTFT |    – |" in latency_table(summary)
    assert json.loads(json.dumps(summarize(result_of()).to_json()))["num_requests"] == 0


def test_notes_name_each_fault() -> None:
    bad = record([5], fault=Fault.CUT)
    result = replace(result_of(record([1, 2]), bad, bad), num_unsent=7)
    text = notes(summarize(result))
    assert "2 of 3 requests had a fault" in text
    assert "7 turns after them were not sent" in text
    assert "cut ×2: it was cut" in text
    assert "no stream had a fault" in notes(summarize(result_of(record([1]))))


def test_a_busy_or_late_client_is_doubted() -> None:
    calm = result_of(record([10]), cpu_s=1.0)
    assert warnings(summarize(calm), has_cap=False) == []
    [busy] = warnings(summarize(replace(calm, client_cpu_s=1.5)), has_cap=False)
    assert "75% of a core" in busy
    late = summarize(result_of(*[record([90], sent_ms=30)] * 3))
    [lag] = warnings(late, has_cap=False)
    assert "30 ms late" in lag
    assert warnings(late, has_cap=True) == []
