"""`make bench`: a real server, which all tests share, asked with few tokens."""

from __future__ import annotations

import contextlib

import pytest

from penstock.load.bench import quick
from penstock.load.launch import Started


@pytest.fixture
def shared(demo: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server that it would start; `test_launch.py` shows that one starts."""
    monkeypatch.setattr(quick, "server", lambda *_: contextlib.nullcontext(demo))


def rows_of(printed: str) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in printed.splitlines()
        if line.startswith("|")
    ]


@pytest.mark.usefixtures("shared")
def test_it_shows_start_memory_and_speed(capsys: pytest.CaptureFixture[str]) -> None:
    assert quick.main(["--streams", "1,3", "--output-tokens", "8"]) == 0
    printed = capsys.readouterr()
    assert "model demo · ready after " in printed.out
    assert printed.err == ""
    rows = rows_of(printed.out)
    assert [row[0] for row in rows[2:5]] == ["supervisor", "engine", "gateway"]
    speeds = rows[7:]
    assert [row[:2] for row in speeds] == [
        ["1", "chat, SSE"],
        ["3", "chat, SSE"],
        ["3", "responses, SSE"],
        ["3", "responses, WebSocket"],
    ]
    for row in speeds:
        tokens_per_s, ttft_ms, ttft_p99_ms, itl_ms, itl_p99_ms, num_faults = (
            float(cell.replace(",", "")) for cell in row[2:]
        )
        assert tokens_per_s > 0.0
        assert 0.0 < ttft_ms <= ttft_p99_ms
        assert 0.0 <= itl_ms <= itl_p99_ms  # 0 where one read finds several tokens
        assert num_faults == 0


@pytest.mark.usefixtures("shared")
def test_a_stream_with_a_fault_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert quick.main(["--streams", "2", "--model", "another"]) == 1
    printed = capsys.readouterr()
    assert [row[-1] for row in rows_of(printed.out)[7:]] == ["4", "4", "4"]
    assert "refused: " in printed.err


def test_without_a_server_there_is_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert quick.main(["--", "--num-blocks", "0"]) == 2
    assert "the server ended" in capsys.readouterr().err
