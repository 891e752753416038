"""The pool's protocol: every interleaving of its model, and the C code stopped where it hurts."""

from __future__ import annotations

import contextlib
import functools
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.kernels.cpu.build import find_compiler

from .pool_model import Job, Order, Pool, ProtocolError, Search

_DRIVER = Path(__file__).with_name("pool_driver.c")
_POOL = Path(__file__).parents[3] / "kernels/cpu"
_HANG_S = "60"  # without a single run of microseconds, in ticks of the driver
_NO_FUTEX = "#define WITHOUT_FUTEX\n"  # as outside Linux
_END_OF_RUN = "    if (!job.num_items) atomic_store(&pool.is_running, 0);\n"

Driver = Callable[..., subprocess.CompletedProcess[str]]

REPEATED, FIXED = Job(2), Job(2, is_repeatable=False)
OPENED, ALONE = Job(2, is_repeatable=False, opens=True), Job(1)


@pytest.mark.parametrize(
    "runs",
    [
        [[FIXED], [FIXED]],
        *(
            pytest.param(runs, marks=pytest.mark.exhaustive)
            for runs in (
                [[REPEATED], [REPEATED]],
                [[OPENED], [REPEATED]],
                [[REPEATED, FIXED], [REPEATED]],
                [[REPEATED, OPENED], [ALONE, REPEATED]],
                [[REPEATED, REPEATED, REPEATED]],
            )
        ),
    ],
    ids=str,
)
def test_no_interleaving_of_two_threads_is_at_fault(runs: list[list[Job]]) -> None:
    assert Search(Pool(runs, 2, Order())).run() > 1000


@pytest.mark.exhaustive
@pytest.mark.parametrize("runs", [[[REPEATED]], [[FIXED]]], ids=str)
def test_no_interleaving_of_three_threads_is_at_fault(runs: list[list[Job]]) -> None:
    assert Search(Pool(runs, 3, Order()), is_coarse=True).run() > 100_000


@pytest.mark.parametrize(
    ("order", "runs", "fault"),
    [
        pytest.param(
            Order(ends_first=True, numbers_by_epoch=True),
            [[FIXED], [FIXED]],
            "the run hangs",
            id="as it was",
        ),
        pytest.param(
            Order(ends_first=True),
            [[FIXED], [FIXED]],
            "the run hangs",
            id="the run is said to be over before its last ticket",
        ),
        pytest.param(
            Order(numbers_by_epoch=True),
            [[REPEATED, REPEATED], [REPEATED]],
            "which does not run",
            id="two jobs of one number, where a thread stands still before it stores the epoch",
        ),
        pytest.param(
            Order(num_numbers=2),
            [[REPEATED] * 4],
            "an item of no job|which does not run",
            id="numbers begin anew while a thread stands still",
        ),
    ],
)
def test_the_search_finds_what_was_at_fault(
    order: Order, runs: list[list[Job]], fault: str
) -> None:
    with pytest.raises(ProtocolError, match=fault):
        Search(Pool(runs, 2, order)).run()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Driver]:
    """Makes the driver around that text of `pool.c`, to be called with its arguments."""

    @functools.cache
    def build(pool: str) -> Driver:
        folder = tmp_path_factory.mktemp("driver")
        (folder / "pool.c").write_text(pool)
        program = str(folder / "driver")
        flags = ["-std=gnu11", "-O2", "-pthread", f"-I{folder}", f"-I{_POOL}", "-o", program]
        subprocess.run([*find_compiler(), *flags, str(_DRIVER)], check=True)

        def run(*arguments: str) -> subprocess.CompletedProcess[str]:
            command = [program, *arguments]
            return subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)

        return run

    return build


@contextlib.contextmanager
def burners(number: int) -> Iterator[None]:
    """So many processes that want a core each."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for burner in running:
            burner.kill()
            burner.wait()


@pytest.mark.exhaustive
def test_a_worker_that_stands_still_at_the_end_of_a_run_harms_no_later_one(
    compiled: Callable[[str], Driver],
) -> None:
    done = compiled((_POOL / "pool.c").read_text())("end", "2", "0", _HANG_S)
    assert done.returncode == 0, done.stdout


@pytest.mark.exhaustive
def test_it_would_harm_one_if_the_run_were_said_to_be_over_first(
    compiled: Callable[[str], Driver],
) -> None:
    """Were the pause not where it hurts, the test above could not fail."""
    text = (_POOL / "pool.c").read_text()
    place = "    POOL_PAUSE(BEFORE_TICKET);\n"
    assert text.count(place) == 1
    done = compiled(text.replace(place, _END_OF_RUN + place))("end", "2", "0", "5")
    assert done.returncode == 3, done.stdout
    assert "does not end: job " in done.stdout
    assert "thread 1: " in done.stdout


@pytest.mark.parametrize(
    ("mode", "num_threads", "duration_s", "defines"),
    [
        ("random", "3", "1", ""),
        *(
            pytest.param(mode, num_threads, "4", defines, marks=pytest.mark.exhaustive)
            for mode, num_threads, defines in (
                ("plain", "2", ""),
                ("random", "2", ""),
                ("random", "3", ""),
                ("plain", "3", _NO_FUTEX),
            )
        ),
    ],
)
def test_short_runs_on_busy_cores_end_and_are_right(
    compiled: Callable[[str], Driver], mode: str, num_threads: str, duration_s: str, defines: str
) -> None:
    run = compiled(defines + (_POOL / "pool.c").read_text())
    with burners(2):
        done = run(mode, num_threads, duration_s, _HANG_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " runs, " in done.stdout
