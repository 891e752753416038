"""When a dead child starts again, and when it does not any more."""

from __future__ import annotations

from penstock.gateway.child import MAX_FAILED_STARTS, RestartPolicy


def test_the_first_restart_is_at_once_and_later_ones_wait_ever_longer() -> None:
    policy = RestartPolicy()
    assert [policy.note_death(1.0) for _ in range(8)] == [0, 0.5, 1, 2, 4, 8, 10, 10]
    assert not policy.is_hopeless, "it was ready every time"


def test_a_healthy_time_makes_up_for_deaths() -> None:
    policy = RestartPolicy()
    policy.note_death(1.0)
    assert policy.note_death(1.0) > 0
    assert policy.note_death(3600.0) == 0
    assert policy.note_death(1.0) > 0


def test_starts_that_fail_in_a_row_are_hopeless() -> None:
    policy = RestartPolicy()
    policy.note_death(100.0)
    for _ in range(MAX_FAILED_STARTS - 1):
        policy.note_death(None)
    assert not policy.is_hopeless
    policy.note_death(0.1)
    for _ in range(MAX_FAILED_STARTS - 1):
        policy.note_death(None)
    assert not policy.is_hopeless, "being ready once begins the count anew"
    policy.note_death(None)
    assert policy.is_hopeless


def test_the_wait_stays_bounded_however_often_it_dies() -> None:
    policy = RestartPolicy()
    assert max(policy.note_death(0.0) for _ in range(5000)) == 10
