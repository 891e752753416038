"""How many engines Ray should run."""

from __future__ import annotations

import pytest

from penstock.engine.errors import ConfigError
from penstock.gateway.launch.ray_engines import Scaling
from penstock.gateway.launch.settings import resolve_settings
from penstock.gateway.storage.redis.engines import EngineRecord


def _records(*engines: tuple[int, float]) -> list[EngineRecord]:
    """By the requests that each has, and the seconds of its queue."""
    return [
        EngineRecord(
            address=f"10.0.0.{number}:7000", model="m", cache_root=b"", block_size=16,
            num_requests=num_requests, num_tokens_waiting=round(queue_s * 100), queue_s=queue_s,
        )
        for number, (num_requests, queue_s) in enumerate(engines)
    ]  # fmt: skip


@pytest.fixture
def scaling() -> Scaling:
    return Scaling(least=1, most=3, queue_s=1.0, idle_s=60.0, max_num_seqs=8)


def test_a_long_queue_starts_one_engine_after_another(scaling: Scaling) -> None:
    long = _records((20, 4.0))
    assert [scaling.decide(long, 1, now_s=float(now)) for now in range(1, 6)] == [0, 0, 0, 1, 0]
    # The second one has not answered yet.
    assert not any(scaling.decide(long, 2, now_s=float(now)) for now in range(6, 30))
    both = _records((20, 4.0), (20, 2.0))
    assert scaling.decide(both, 2, now_s=30.0) == 1
    three = _records((20, 4.0), (20, 2.0), (20, 2.0))
    assert not any(scaling.decide(three, 3, now_s=float(now)) for now in range(31, 60))


def test_a_short_burst_starts_none(scaling: Scaling) -> None:
    for now in range(1, 30):
        queue_s = 0.5 if now % 3 == 0 else 4.0
        assert scaling.decide(_records((9, queue_s)), 1, now_s=float(now)) == 0


def test_the_mean_counts(scaling: Scaling) -> None:
    uneven = _records((20, 1.8), (0, 0.0))
    assert not any(scaling.decide(uneven, 2, now_s=float(now)) for now in range(1, 30))


def test_an_engine_ends_when_the_rest_has_been_enough_for_long(scaling: Scaling) -> None:
    few = _records((2, 0.0), (2, 0.0))  # 4 of 8 slots
    assert [scaling.decide(few, 2, now_s=now) for now in (1.0, 30.0, 60.9, 61.0)] == [0, 0, 0, -1]
    # From then on anew.
    assert [scaling.decide(few, 2, now_s=now) for now in (62.0, 121.0, 122.0)] == [0, 0, -1]


def test_what_one_engine_could_not_take_keeps_two(scaling: Scaling) -> None:
    many = _records((3, 0.0), (2, 0.0))
    waiting = _records((1, 0.1), (0, 0.0))
    for now in range(1, 200):
        assert scaling.decide(many if now % 2 else waiting, 2, now_s=float(now)) == 0


def test_the_least_number_stays(scaling: Scaling) -> None:
    assert not any(scaling.decide(_records((0, 0.0)), 1, now_s=now) for now in (1.0, 100.0, 200.0))


def test_an_engine_without_a_place_ends_too(scaling: Scaling) -> None:
    one_of_two = _records((0, 0.0))
    assert [scaling.decide(one_of_two, 2, now_s=now) for now in (1.0, 61.0)] == [0, -1]


def test_limits_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="--max-replicas needs --ray-address"):
        resolve_settings({"max_replicas": 2}, {})
    ray = {"ray_address": "auto", "discover": True, "redis_url": "redis://localhost"}
    for replicas in (0, 3):
        with pytest.raises(ConfigError, match=r"--max-replicas 2 must be at least --replicas"):
            resolve_settings({**ray, "max_replicas": 2, "replicas": replicas}, {})
