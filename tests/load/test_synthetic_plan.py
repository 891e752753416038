"""What an answer of the synthetic server will be, and when."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ..support.synthetic.plan import Fault, StreamPlan, Trouble

PLAN = StreamPlan(
    began_us=5_000_000,
    created_s=1_700_000_000,
    num_tokens=10,
    prompt_tokens=3,
    cached_tokens=1,
    ttft_us=50_000,
    itl_us=10_000,
    ttft_jitter_us=0,
    itl_jitter_us=0,
    seed=7,
    tokens_per_event=1,
    is_limited=True,
)


def test_times_are_absolute() -> None:
    assert [round(PLAN.due_s(event), 6) for event in (0, 1, 9)] == [5.05, 5.06, 5.14]
    assert PLAN.due_s(10) == PLAN.due_s(9)  # the end comes with the last token
    assert [PLAN.num_due(at_s) for at_s in (5.0499, 5.0501, 5.0601, 9)] == [0, 1, 2, 10]


def test_an_id_holds_the_plan_and_no_other_id_does() -> None:
    response_id = PLAN.response_id()
    assert StreamPlan.from_id(response_id) == PLAN
    other = response_id[:-1] + ("0" if response_id[-1] != "0" else "1")
    for wrong in (other, "resp_", "resp_xyz", "", response_id[:-2], response_id + "00", "ä"):
        assert StreamPlan.from_id(wrong) is None


def test_jitter_is_bounded_seeded_and_adds_up_to_nothing() -> None:
    plan = replace(PLAN, num_tokens=2000, itl_jitter_us=9000, ttft_jitter_us=20_000)
    again, other = replace(plan), replace(plan, seed=8)
    times = [plan.due_s(event) for event in range(2000)]
    assert times == [again.due_s(event) for event in range(2000)]
    assert times != [other.due_s(event) for event in range(2000)]
    assert times == sorted(times)
    first = times[0] - 5.05
    assert 0 < abs(first) <= 0.02
    errors = [at_s - (5.05 + event * 0.01) - first for event, at_s in enumerate(times)]
    assert 0.004 < max(errors) <= 0.005  # half of the ITL, at the end as at the start
    assert max(errors[-200:]) > 0.004
    assert abs(sum(errors) / 2000) < 0.001


def test_tokens_per_event_leave_the_first_token_its_time() -> None:
    plan = replace(PLAN, tokens_per_event=4)
    assert [plan.text(event) for event in range(plan.num_events)] == [
        " t0", " t1 t2 t3 t4", " t5 t6 t7 t8", " t9",
    ]  # fmt: skip
    assert [round(plan.due_s(event), 6) for event in range(4)] == [5.05, 5.09, 5.13, 5.14]


def test_a_fault_is_parsed_or_refused() -> None:
    assert Fault.parse("cut:17") == Fault(Trouble.CUT, 17)
    assert Fault.parse("double_end") == Fault(Trouble.DOUBLE_END)
    assert Fault.parse("") is None
    for wrong in ("explode:1", "cut:x"):
        with pytest.raises(ValueError):
            Fault.parse(wrong)
