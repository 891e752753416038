"""Starting our own server for a bench: real processes."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from urllib.request import urlopen

import psutil
import pytest

from penstock.engine.errors import ConfigError
from penstock.load import launch
from penstock.load.launch import Started, server

from ..system.processes import wait_gone

FAMILY = {"supervisor", "gateway", "engine", "template"}


@pytest.mark.exhaustive
def test_it_is_ready_when_it_is_given(demo: Started) -> None:
    with urlopen(f"{demo.base_url}/v1/models", timeout=60) as answer:
        assert json.load(answer)["data"][0]["id"] == "demo"
    assert demo.ready_s > 0.2  # to import torch alone takes longer
    assert 0.0 < demo.ready_s < time.perf_counter()


@pytest.mark.exhaustive
def test_memory_is_each_process_own(demo: Started) -> None:
    memory = demo.memory()
    assert set(memory) == FAMILY
    for each in memory.values():
        assert 0 < each["uss"] <= each["pss"] <= each["rss"]
    # Torch is in one of them alone, and the supervisor has no framework at all.
    sizes = {name: each["rss"] >> 20 for name, each in memory.items()}
    assert sizes["engine"] > 150 > sizes["gateway"] > 40 > sizes["supervisor"] > 5


@pytest.mark.exhaustive
def test_a_failure_inside_stops_the_server_and_keeps_a_named_log(tmp_path: Path) -> None:
    family: list[psutil.Process] = []

    def fail() -> None:
        with server(flags=["--log-level", "debug"], log=tmp_path / "log") as running:
            family.extend(running.family().values())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert len(family) == len(FAMILY)
    wait_gone(family)
    assert "DEBUG" in (tmp_path / "log").read_text()


@pytest.mark.exhaustive
@pytest.mark.process_kills
def test_what_does_not_heed_a_signal_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_STOP_WITHIN_S", 0.5)
    with server() as running:
        family = running.family()
        for name in ("supervisor", "engine"):
            family[name].send_signal(signal.SIGSTOP)
    wait_gone(family.values())


def test_a_server_that_does_not_start_says_why() -> None:
    with (
        pytest.raises(ConfigError, match=r"(?s)the server ended.*--num-blocks must be a whole"),
        server(flags=["--num-blocks", "0"]),
    ):
        pytest.fail("it started")
