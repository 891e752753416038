"""What a request is told before its first token, by a clock that the test sets."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import msgspec
import pytest

from penstock.engine.protocol.messages import EngineInfo
from penstock.engine.request import Notice, RequestOutput
from penstock.gateway.generation.progress import (
    INTERVAL_S,
    Estimates,
    Expectation,
    Progress,
)

from ..fake_engine import INFO

RATE, NUM_TOKENS = 100.0, 1000


class Queue:
    def wait_s(self, num_tokens_ahead: int) -> float:
        return num_tokens_ahead / RATE


class Told:
    """A request's progress."""

    def __init__(self, estimates: Estimates, num_tokens: int = NUM_TOKENS) -> None:
        self.now_s, self.estimates = 0.0, estimates
        expectation = Expectation(estimates, wait_s=1.0, num_tokens=num_tokens, num_new=num_tokens)
        self.progress = Progress(
            num_tokens, estimates, expectation, Queue(), clock=lambda: self.now_s
        )

    def hear(self, **output: object) -> None:
        self.progress.hear(RequestOutput(request_id="r", **output))  # type: ignore[arg-type]


@pytest.fixture
def told() -> Told:
    return Told(Estimates(lambda: RATE, lambda _: None))


def test_each_stage_is_told_at_once_and_again_within_a_second(told: Told) -> None:
    first = told.progress.take()
    assert first is not None
    assert first["stage"] == "queued"
    assert 11_000 < first["estimated_ms"] <= 12_000
    assert told.progress.take() is None
    told.hear(queue_position=2, num_tokens_ahead=500)
    assert told.progress.take() is None
    told.now_s += 0.25
    assert told.progress.take() == {"stage": "queued", "position": 2, "estimated_ms": 15_360}
    told.hear(notice=Notice.PREPARING, param="grammar")
    assert told.progress.take() == {"stage": "preparing", "resource": "grammar"}
    for _ in range(3):
        assert 0 < told.progress.due_in_s() <= INTERVAL_S < 1.0
        told.now_s += told.progress.due_in_s()
        assert told.progress.take() == {"stage": "preparing", "resource": "grammar"}


def test_a_prompt_is_told_at_its_own_rate_and_interpolated_between_steps(told: Told) -> None:
    told.hear(num_tokens_ahead=800, num_cached_tokens=64, num_host_cached_tokens=16)
    event = told.progress.take()
    assert event == {
        "stage": "prefilling",
        "computed_tokens": 200,
        "cached_tokens": {"device": 48, "host": 16},
        "prompt_tokens": NUM_TOKENS,
        "tokens_per_second": RATE,
        "estimated_ms": 8586,  # later tokens are assumed to take longer
        "interpolated": False,
    }
    told.now_s += 2.0
    told.hear(num_tokens_ahead=700, num_cached_tokens=64)
    event = told.progress.take()
    assert event is not None
    assert (event["tokens_per_second"], event["estimated_ms"]) == (50.0, 14_663)
    told.now_s += 1.0
    event = told.progress.take()
    assert event is not None
    assert (event["computed_tokens"], event["interpolated"]) == (349, True)
    told.now_s += 100.0
    event = told.progress.take()
    assert event is not None
    assert event["computed_tokens"] == NUM_TOKENS - 1, "the last one comes with the first token"
    told.now_s += 1.0
    told.hear(num_tokens_ahead=400)
    event = told.progress.take()
    assert event is not None
    assert (event["computed_tokens"], event["interpolated"]) == (NUM_TOKENS - 1, True), "not back"
    told.now_s += 1.0
    told.hear(num_tokens_ahead=900)
    event = told.progress.take()
    assert event is not None
    assert event["computed_tokens"] == 100, "it is computed again, after it was preempted"


def test_predictions_are_corrected_by_what_was() -> None:
    ratios: list[float] = []
    estimates = Estimates(lambda: RATE, ratios.append)
    for _ in range(8):
        told_s = estimates.corrected(57.0, 4000)
        estimates.learn(57.0, told_s, 10.0, 4000)
    assert ratios[0] == pytest.approx(5.7)
    assert all(0.7 < ratio < 1.3 for ratio in ratios[1:])
    assert estimates.corrected(5.7, 4000) == pytest.approx(1.0)
    assert estimates.corrected(57.0, 64) == pytest.approx(10.0), "until such sizes are known"
    estimates.learn(1.0, 1.0, 1.0, 64)
    assert estimates.corrected(1.0, 64) == pytest.approx(1.0)
    estimates.learn(0.0, 0.0, 5.0, 64)
    estimates.learn(5.0, 5.0, 0.001, 64)
    assert len(ratios) == 9, "what was not measured, or took no time, says nothing"
    estimates.learn(1.0, 1.0, 1e9, 4000)
    assert estimates.corrected(1.0, 4000) < 1.0, "one outlier"


def cost_s(start: int, stop: int) -> float:
    """Of tokens that attend to those before them: 1 ms, and 0.4 µs for each of these."""
    return (stop - start) * (1e-3 + 4e-7 * (start + stop) / 2)


def test_later_tokens_of_a_prompt_take_longer(told: Told) -> None:
    long = Told(told.estimates, 10_000)
    for num_computed in range(1000, 10_000, 1000):
        long.hear(num_tokens_ahead=10_000 - num_computed)
        long.now_s += cost_s(num_computed, num_computed + 1000)
    again = Told(told.estimates, 10_000)
    for num_computed in (1000, 2000, 3000):  # at half the speed, as others have the other half
        again.hear(num_tokens_ahead=10_000 - num_computed)
        event = again.progress.take()
        again.now_s += 2 * cost_s(num_computed, num_computed + 1000)
    assert event is not None
    left_s = cost_s(3000, 10_000)
    assert left_s < event["estimated_ms"] / 1e3 < 2.05 * left_s, "between the usual and its own"
    assert told.estimates.costs.seconds(3000, 10_000) == pytest.approx(left_s, rel=0.02)


def test_short_prompts_say_little_about_what_late_tokens_of_long_ones_take(told: Told) -> None:
    for seconds in (0.1, 0.2):  # the second of two steps took twice as long, by chance
        short = Told(told.estimates, 400)
        for num_computed in (100, 200, 300):
            short.hear(num_tokens_ahead=400 - num_computed)
            short.now_s += seconds
    assert 8.0 < told.estimates.prompt_s(0, 8000) < 24.0


def test_the_first_prompt_after_a_start_has_an_estimate(
    told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path))
    engine = msgspec.structs.replace(INFO, cache_root=b"weights")

    def started(rate: float = 0.0, of: EngineInfo = engine) -> Estimates:
        estimates = Estimates(lambda: rate, lambda _: None)
        estimates.begin(of)
        return estimates

    before = started(RATE)
    assert before.prompt_s(0, 8000) == pytest.approx(80.0, rel=0.5), "nothing is kept yet"
    long = Told(before, 10_000)
    for num_computed in range(1000, 10_000, 1000):
        long.hear(num_tokens_ahead=10_000 - num_computed)
        long.now_s += cost_s(num_computed, num_computed + 1000)
    before.close()
    assert not list(tmp_path.rglob("*.json")), "no prompt has come to its first token"
    asyncio.run(_met(before))
    (kept,) = tmp_path.rglob("*.json")
    after = started()
    assert after.prompt_s(0, 8000) == pytest.approx(cost_s(0, 8000), rel=0.05)
    assert after.rate() == RATE
    for _ in range(12):  # the machine has become slower
        after.costs.note(0, 1000, 3 * cost_s(0, 1000))
    assert after.prompt_s(0, 1000) > 2.0 * cost_s(0, 1000)
    others = msgspec.structs.replace(engine, num_threads=7), INFO
    assert [started(of=other).prompt_s(0, 8000) for other in others] == [0.0, 0.0]
    for broken in ("", "{}", "[1, 2]", "[1, 1, 1, 1, 1, NaN]", '["x"]', "[-1, 1, 1, 1, 1, 1]"):
        kept.write_text(broken)
        assert started().prompt_s(0, 8000) == 0.0


async def _met(estimates: Estimates) -> None:
    """A request's first token; and the server's end, which waits for what is written."""
    estimates.learn(1.0, 1.0, 1.0, 10_000)
    await asyncio.get_running_loop().shutdown_default_executor()


def test_the_next_prediction_is_not_corrected_for_what_the_steps_have_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ratios: list[float] = []
    estimates = Estimates(lambda: 1000.0, ratios.append)
    for _ in range(2):
        told = Told(estimates, 10_000)
        monkeypatch.setattr(
            "penstock.gateway.generation.progress.perf_counter", partial(getattr, told, "now_s")
        )
        expectation = Expectation(estimates, wait_s=0.0, num_tokens=10_000, num_new=10_000)
        for num_computed in range(0, 10_000, 500):
            told.hear(num_tokens_ahead=10_000 - num_computed)
            told.now_s += cost_s(num_computed, num_computed + 500)
        expectation.met()
    assert 0.4 < ratios[0] < 0.7, "by the rate of short prompts, and what is assumed"
    assert ratios[1] == pytest.approx(1.0, abs=0.05)
