"""`penstock bench gateway`: real processes, few streams."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest

from .conftest import Penstock


@pytest.mark.exhaustive
@pytest.mark.timeout(900)  # ten starts of a gateway
def test_every_wire_is_measured(penstock: Penstock, tmp_path: Path) -> None:
    arguments = ("--streams", "3", "--frames-per-s", "200", "--window-s", "1",
                 "--intervals-ms", "0", "100", "--idle-sockets", "20",
                 "--stores", "memory", "disk")  # fmt: skip
    done = penstock("bench", "gateway", *arguments, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "gateway.json").read_text())
    rows = {(row["wire"], row["store"], row["interval_ms"]): row for row in figures["rows"]}
    of_responses = product(("responses", "websocket"), ("memory", "disk"), (0.0, 100.0))
    assert set(rows) == {("chat", "memory", 0.0), *of_responses}
    for (_, _, interval_ms), row in rows.items():
        assert row["tokens_per_s"] > 0
        # Of a token counted twice it would be the time since the machine was started.
        assert 0 < row["p50_ms"] <= row["p99_ms"] < 60_000
        # 20 frames are merged in 100 ms, none in 0 unless the machine is busy.
        assert row["tokens_per_event"] > 2.5 if interval_ms else row["tokens_per_event"] >= 1
    # The clock of CPU time ticks every 10 ms, and not in every window.
    assert sum(row["cpu_us_per_token"] for row in rows.values()) > 0
    assert 0 < figures["idle_socket_bytes"] < 1 << 20
    assert "An idle WebSocket takes " in done.stdout


def test_a_window_beyond_the_clock_file_is_refused(penstock: Penstock, tmp_path: Path) -> None:
    arguments = ("--frames-per-s", "5000", "--window-s", "5", "--out", str(tmp_path))
    done = penstock("bench", "gateway", *arguments)
    assert done.returncode == 2
    assert "clock file" in done.stderr
