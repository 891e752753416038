"""A rank that dies or stands still ends its engine, and streams go on in the next."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import psutil
import pytest

from .endless_streams import EndlessStreams
from .processes import Served, serve, wait_until

_RANK, _ENGINE = "penstock-rank 1", "penstock-engine"


async def _survive(
    served: Served, streams: EndlessStreams, name: str, number: signal.Signals
) -> None:
    """Wait for the end of all ranks, and for more of all streams, after one of them was struck."""
    served.renew_family()
    ranks = [each for each in served.family if "rank" in each.name()]
    struck = served.child(name)
    num_back = served.log.read_text().count("the engine is back")
    await streams.grow(5)
    struck.send_signal(number)
    await asyncio.to_thread(
        wait_until, lambda: served.log.read_text().count("the engine is back") > num_back
    )
    await streams.grow(5)
    assert ranks
    assert not any(map(psutil.Process.is_running, (struck, *ranks)))


def _flags(long_model: tuple[str, ...], flag: str) -> tuple[str, ...]:
    return (*long_model, "--dtype", "float32", flag, "2", "--num-threads", "1")


@pytest.mark.exhaustive
async def test_a_killed_rank_ends_the_engine(long_model: tuple[str, ...], tmp_path: Path) -> None:
    with serve(*_flags(long_model, "--tensor-parallel-size"), log=tmp_path / "log") as served:
        async with EndlessStreams(served.base_url, 4) as streams:
            await _survive(served, streams, _RANK, signal.SIGKILL)
        await streams.check()
        assert "rank 1 has ended (exit code -9): the engine ends" in served.log.read_text()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("flag", "strikes"),
    [
        (
            "--tensor-parallel-size",
            [(_RANK, signal.SIGSTOP), (_ENGINE, signal.SIGKILL), (_ENGINE, signal.SIGSTOP)],
        ),
        # What becomes of the engine itself is the same, and who looks after the ranks too.
        ("--pipeline-parallel-size", [(_RANK, signal.SIGKILL)]),
    ],
)
async def test_streams_survive_each_rank(
    flag: str,
    strikes: list[tuple[str, signal.Signals]],
    long_model: tuple[str, ...],
    tmp_path: Path,
) -> None:
    with serve(*_flags(long_model, flag), log=tmp_path / "log") as served:
        async with EndlessStreams(served.base_url, 8) as streams:
            for name, number in strikes:
                await _survive(served, streams, name, number)
        await streams.check()
        log = served.log.read_text()
    has_stood_still = "rank 1 has not moved for 10 s: the engine ends" in log
    assert has_stood_still == ((_RANK, signal.SIGSTOP) in strikes)
    # Where the engine stood still, rank 1 ended it.
    assert log.count("died (SIGKILL)") == sum(name == _ENGINE for name, _ in strikes)
