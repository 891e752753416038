"""`penstock status`."""

from __future__ import annotations

import pytest

from penstock.gateway.launch.pool_status import show, table


def test_a_line_for_each_engine() -> None:
    engine = {
        "name": "0", "state": "ready", "num_requests_running": 3, "num_requests_waiting": 0,
        "num_streams": 3, "kv_cache_usage": 0.25, "prefix_cache_hit_rate": 0.5,
    }  # fmt: skip
    lines = table([engine, {"name": "10.0.0.1:7000", "state": "lost"}]).splitlines()
    assert lines[0].split() == [
        "engine", "state", "running", "waiting", "streams", "here", "KV", "used", "cached",
    ]  # fmt: skip
    assert lines[1].split() == ["0", "ready", "3", "0", "3", "25%", "50%"]
    assert lines[2].split() == ["10.0.0.1:7000", "lost", *"–––––"]


def test_a_server_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert show("http://127.0.0.1:1") == 1
    assert "http://127.0.0.1:1 does not answer" in capsys.readouterr().err
    assert show("file:///etc/passwd") == 2
    assert "is no URL" in capsys.readouterr().err
