"""kill -9 and SIGSTOP of each rank of an engine under streams: none is lost."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from .processes import Served, serve, wait_until

_NUM_STREAMS = 32
_BACK_S = 90.0  # a start on a machine that does much else
_NUM_TOKENS = 60


def _body(number: int) -> dict[str, Any]:
    return {
        "model": "demo",
        "prompt": f"{number} times upon a time",
        "stream": True,
        "max_tokens": _NUM_TOKENS,
        "min_tokens": _NUM_TOKENS,
        "temperature": 0.8,
        "seed": number,
    }


async def _read(client: httpx.AsyncClient, number: int, on_line: Callable[[], None]) -> list[str]:
    async with client.stream("POST", "/v1/completions", json=_body(number)) as response:
        assert response.status_code == 200, await response.aread()
        lines = []
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                assert '"error"' not in line, line
                lines.append(line)
                on_line()
        assert lines[-1] == "data: [DONE]"
        return lines


async def _texts(
    client: httpx.AsyncClient, *, cut: int = 0, strike: Callable[[], object] = lambda: None
) -> list[str]:
    """What all streams say; `strike` is called once, after so many lines of all."""
    num_lines = 0

    def count() -> None:
        nonlocal num_lines
        num_lines += 1
        if num_lines == cut:
            strike()

    streams = await asyncio.gather(*(_read(client, each, count) for each in range(_NUM_STREAMS)))
    chunks = [
        [httpx.Response(200, text=line.removeprefix("data: ")).json() for line in lines[:-1]]
        for lines in streams
    ]
    return ["".join(each["choices"][0]["text"] for each in stream) for stream in chunks]


def _rank(served: Served, name: str) -> psutil.Process:
    served.renew_family()
    return served.child(name)


RANK, ENGINE = "penstock-rank 1", "penstock-engine"
STRIKES = {
    "--tensor-parallel-size": [
        (RANK, signal.SIGKILL),
        (ENGINE, signal.SIGKILL),
        (RANK, signal.SIGSTOP),
        (ENGINE, signal.SIGSTOP),
    ],
    # What becomes of the engine itself is the same.
    "--pipeline-parallel-size": [(RANK, signal.SIGKILL), (RANK, signal.SIGSTOP)],
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("flag", STRIKES)
async def test_streams_survive_each_rank(flag: str, tmp_path: Path) -> None:
    flags, strikes = ("--dtype", "float32", flag, "2", "--num-threads", "1"), STRIKES[flag]
    with serve(*flags, log=tmp_path / "log") as served:
        async with httpx.AsyncClient(base_url=served.base_url, timeout=_BACK_S) as client:
            expected = await _texts(client)
            assert all(expected)
            for num_back, (name, number) in enumerate(strikes, 1):
                struck = _rank(served, name)
                others = [each for each in served.family if "penstock-rank" in each.name()]

                def strike(struck: psutil.Process = struck, number: int = number) -> None:
                    struck.send_signal(number)

                texts = await _texts(client, cut=200, strike=strike)
                assert texts == expected, f"{name}, {number}"
                wait_until(
                    lambda: served.log.read_text().count("the engine is back") >= num_back  # noqa: B023
                )
                assert not any(each.is_running() for each in (struck, *others))
    log = served.log.read_text()
    assert "rank 1 has ended (exit code -9): the engine ends" in log
    assert "rank 1 has not moved for 10 s: the engine ends" in log
    # Where the engine stood still, rank 1 ended it.
    assert log.count("died (SIGKILL)") == sum(name == ENGINE for name, _ in strikes)
