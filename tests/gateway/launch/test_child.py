"""When a dead child starts again, when it does not any more, and when a silent one is killed."""

from __future__ import annotations

import contextlib
import math
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.gateway.launch.child import MAX_FAILED_STARTS, Child, RestartPolicy

from . import living_child

_PATIENCE_S = 60.0
_MAX_SILENT_LOOKS = 20


@pytest.fixture
def silent(tmp_path: Path) -> Path:
    """The file from which on the child gives no sign of life."""
    return tmp_path / "silent"


@pytest.fixture
def child(silent: Path) -> Iterator[Child]:
    """One that is ready and gives signs of life."""
    values = {"silent": str(silent), "stacks": str(silent.with_name("stacks"))}
    started = Child("it", living_child.__name__, values, max_silent_looks=_MAX_SILENT_LOOKS)
    started.start()
    deadline_s = time.monotonic() + _PATIENCE_S
    while not started.read_status():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    assert started.ready is not None
    yield started
    if started.process is not None:
        with contextlib.suppress(ProcessLookupError):
            started.kill()
        started.reap()
    assert started.pulse_fd is None


def test_a_child_that_gives_signs_of_life_is_let_be(child: Child) -> None:
    assert child.pulse_fd is not None
    for _ in range(2 * _MAX_SILENT_LOOKS):
        assert select.select([child.pulse_fd], [], [], _PATIENCE_S)[0]
        for _ in range(2):  # the second one is perhaps too soon for another sign
            assert not child.look()
    assert child.num_silent_looks <= 1
    assert not child.is_dead


@pytest.mark.process_kills
def test_a_child_without_signs_of_life_shows_its_stacks_and_is_killed(
    child: Child, silent: Path
) -> None:
    silent.touch()
    deadline_s = time.monotonic() + _PATIENCE_S
    while not child.look():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    while "in _be_silent" not in silent.with_name("stacks").read_text():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    assert not child.is_dead
    for _ in range(2):
        assert not child.look(), "told once"
    assert child.process is not None
    assert child.process.wait(_PATIENCE_S) == -signal.SIGKILL
    assert child.reap() == "it died (SIGKILL)"
    assert not child.keeps_pool, "it may be why"


@pytest.mark.process_kills
@pytest.mark.parametrize(
    ("number", "last_died_at_s", "keeps"),
    [(signal.SIGKILL, -math.inf, True), (signal.SIGKILL, math.inf, False),
     (signal.SIGSEGV, -math.inf, False)],
    ids=["killed", "killed soon again", "its own fault"],
)  # fmt: skip
def test_an_engines_pool_is_kept_if_it_was_not_its_fault(
    child: Child, number: int, last_died_at_s: float, keeps: bool
) -> None:
    assert child.process is not None
    child.died_at_s = last_died_at_s
    child.process.send_signal(number)
    child.process.wait(_PATIENCE_S)
    child.reap()
    assert child.keeps_pool is keeps


@pytest.mark.process_kills
def test_a_child_that_was_made_to_stand_still_is_not_killed(child: Child) -> None:
    assert child.process is not None
    child.process.send_signal(signal.SIGSTOP)
    stat = Path(f"/proc/{child.process.pid}/stat")
    deadline_s = time.monotonic() + _PATIENCE_S
    while stat.read_text().split()[2] != "T":
        assert time.monotonic() < deadline_s
    for _ in range(3 * _MAX_SILENT_LOOKS):
        assert not child.look()
    assert child.num_silent_looks == 0
    child.process.send_signal(signal.SIGCONT)
    assert not child.is_dead


def test_the_first_restart_is_at_once_and_later_ones_wait_ever_longer() -> None:
    policy = RestartPolicy()
    assert [policy.note_death(0.0) for _ in range(8)] == [0, 0.5, 1, 2, 4, 8, 10, 10]
    assert not policy.is_hopeless, "it was ready every time"


def test_the_time_that_it_was_ready_counts_as_waited() -> None:
    policy = RestartPolicy()
    assert [policy.note_death(1.0) for _ in range(8)] == [0, 0, 0, 1, 3, 7, 9, 9]


def test_a_healthy_time_makes_up_for_deaths() -> None:
    policy = RestartPolicy()
    policy.note_death(0.1)
    assert policy.note_death(0.1) > 0
    assert policy.note_death(3600.0) == 0
    assert policy.note_death(0.1) > 0


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
