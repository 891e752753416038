"""`penstock bench gateway`: the real gateway process before the stub engine, with a few streams."""

from __future__ import annotations

import json
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path

import pytest

from penstock.engine.errors import ConfigError
from penstock.load.bench import gateway as bench
from penstock.load.gateway import writers
from penstock.load.gateway.readme import NAME, README, summary
from penstock.load.report.tables import marked


def run(out: Path, *arguments: str) -> int:
    parser = ArgumentParser()
    bench.add_arguments(parser)
    return bench.run(parser.parse_args([*arguments, "--out", str(out)]))


@pytest.mark.exhaustive
@pytest.mark.timeout(900)  # six starts of a gateway
def test_every_wire_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--streams", "3", "--frames-per-s", "200", "--window-s", "1",
                 "--intervals-ms", "0", "100", "--idle-sockets", "20")  # fmt: skip
    assert run(tmp_path, *arguments) == 0
    figures = json.loads((tmp_path / "gateway.json").read_text())
    rows = {(row["wire"], row["interval_ms"]): row for row in figures["rows"]}
    assert set(rows) == {
        ("chat", 0.0), ("responses", 0.0), ("websocket", 0.0), ("responses", 100.0),
        ("websocket", 100.0),
    }  # fmt: skip
    for (_, interval_ms), row in rows.items():
        assert row["tokens_per_s"] > 0
        # Of a token counted twice it would be the time since the machine was started.
        assert 0 < row["p50_ms"] <= row["p99_ms"] < 60_000
        # 20 frames are merged in 100 ms, none in 0 unless the machine is busy.
        assert row["tokens_per_event"] > 2.5 if interval_ms else row["tokens_per_event"] >= 1
    # The clock of CPU time ticks every 10 ms, and not in every window.
    assert sum(row["cpu_us_per_token"] for row in rows.values()) > 0
    assert 0 < figures["idle_socket_bytes"] < 1 << 20
    printed = capsys.readouterr().out
    assert "An idle WebSocket takes " in printed


def test_a_window_beyond_the_clock_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="clock file"):
        run(tmp_path, "--frames-per-s", "5000", "--window-s", "5")


def test_stub_servers_are_read_like_the_gateway() -> None:
    """What `--router` puts behind vllm-router."""
    parser = ArgumentParser()
    bench.add_arguments(parser)
    parsed = parser.parse_args(["--window-s", "0.5"])
    with bench.stub_servers(parsed, num_engines=2) as (servers, clock_file):
        port, pid = servers[1]
        seen, _ = bench.window(parsed, "chat", 4, port, pid, clock_file)
    assert 0 < seen["num_tokens"] == seen["num_events"]
    assert seen["num_lost"] == 0
    assert 0 < seen["p50_ms"] <= seen["p99_ms"] < 60_000  # by this server's part of the clock file


def test_writers_are_measured_before_the_same_streams() -> None:
    parsed = Namespace(streams=50, ticks_per_s=50.0, window_s=0.4)
    cpus_us = []
    for writer in writers.WRITERS:
        began_s = time.perf_counter()
        events_per_s, cpu_us, _ = writers.measure(writer, parsed)
        assert 0 < events_per_s * parsed.window_s <= 50 * 50 * (time.perf_counter() - began_s)
        cpus_us.append(cpu_us)
    assert sum(cpus_us) > 0  # its clock ticks every 10 ms, and not in every window


def test_the_readme_shows_the_newest_run() -> None:
    newest = max((README.parent / "results").glob("*-gateway.json"))
    assert marked(README, NAME) == summary(newest)
