"""`penstock bench startup`: a real server, which all tests share, asked with few tokens."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from penstock.load import startup
from penstock.load.launch import Started

from .conftest import Penstock


@pytest.fixture
def shared(demo: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server that it would start; `test_launch.py` shows that one starts."""
    monkeypatch.setattr(startup, "server", lambda *_: contextlib.nullcontext(demo))


@pytest.mark.usefixtures("shared")
def test_it_shows_start_memory_and_speed(penstock: Penstock, tmp_path: Path) -> None:
    arguments = ("--repeats", "2", "--streams", "1,3", "--output-tokens", "8", "--no-kill")
    done = penstock("bench", "startup", *arguments, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "model demo · ready after " in done.stdout
    assert set(done.stdout.splitlines()) > set(
        (tmp_path / "startup.md").read_text().splitlines()[2:]
    )
    figures: dict[str, Any] = json.loads((tmp_path / "startup.json").read_text())
    assert len(figures["starts"]) == 2
    for start in figures["starts"]:
        assert min(start["ready_s"], start["first_token_s"]) > 0.0
        for memory in (start["idle"], start["used"]):
            assert sorted(memory) == ["engine", "gateway", "supervisor", "template"]
    ways = [(run["server"], run["load"]["concurrency"]) for run in figures["speeds"]]
    assert ways == [
        ("chat, sse", 1), ("chat, sse", 3), ("responses, sse", 3), ("responses, websocket", 3)
    ]  # fmt: skip
    for case in figures["speeds"]:
        summary = case["summary"]
        assert summary["num_failed"] == 0
        assert summary["output_tokens_per_s"] > 0.0
        assert 0.0 < summary["ttft_ms"]["p50"] <= summary["ttft_ms"]["p99"]


@pytest.mark.usefixtures("shared")
def test_a_stream_with_a_fault_is_told(penstock: Penstock, tmp_path: Path) -> None:
    arguments = ("--repeats", "1", "--streams", "2", "--model", "another", "--no-kill")
    done = penstock("bench", "startup", *arguments, "--out", str(tmp_path))
    assert done.returncode == 1
    assert "refused: " in done.stderr


def test_without_a_server_there_is_a_reason(penstock: Penstock, tmp_path: Path) -> None:
    done = penstock("bench", "startup", "--out", str(tmp_path), "--", "--num-blocks", "0")
    assert done.returncode == 2
    assert "the server ended" in done.stderr


@pytest.mark.process_kills
@pytest.mark.exhaustive
def test_streams_outlive_their_engine(penstock: Penstock, tmp_path: Path) -> None:
    arguments = ("--repeats", "1", "--streams", "3", "--output-tokens", "8")
    done = penstock("bench", "startup", *arguments, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    [start] = json.loads((tmp_path / "startup.json").read_text())["starts"]
    assert start["gap_s"] > 0.0
    assert "… whose engine is killed" in done.stdout
