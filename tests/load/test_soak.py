"""Whole soaks: clean where nothing is wrong, and not clean where something is."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from penstock.load.soak import command as bench
from penstock.load.soak.command import Plan
from penstock.load.soak.target import Target, given_server
from penstock.load.soak.verdict import Bounds, findings

from ..support.synthetic_target import synthetic_server
from .conftest import Penstock, run_command

QUICK = "--ttft-ms 10 --itl-ms 2"
# With these every kind of stream that a test asks for is among those that clients begin with, a
# crowd too, so that a slow machine has them all: who has begun is let finish.
SEED, SEED_OF_SIX = 321, 1619


def parse(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(flags)


def test_a_right_server_is_found_clean(tmp_path: Path) -> None:
    """What its clients begin with, and that is a stream of each kind."""
    flags = parse("--no-kills", "--minutes", "0.01", "--seed", str(SEED), "--out", str(tmp_path))
    with synthetic_server(QUICK) as target:
        done = run_command(lambda: bench.soak_target(target, flags))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Verdict: clean." in done.stdout
    report = json.loads((tmp_path / "soak.json").read_text())
    assert report["is_clean"]
    streams = {row["actor"]: row for row in report["streams"]}
    for name in ("resume, sse", "resume, websocket", "cancel by id", "read to the end, chat"):
        assert streams[name]["ended"] > streams[name]["faulty"] == 0
    assert {process["name"] for process in report["samples"][0]["processes"]} == {"synthetic"}
    assert "Verdict: clean." in (tmp_path / "soak.md").read_text()


@pytest.mark.exhaustive
@pytest.mark.process_kills
def test_what_its_kills_break_is_clean(tmp_path: Path) -> None:
    flags = parse("--minutes", "0.1", "--seed", str(SEED), "--out", str(tmp_path))
    flags.kills = True
    with synthetic_server(QUICK) as target:
        done = run_command(lambda: bench.soak_target(target, flags))
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "soak.json").read_text())["adversities"]


async def whats(target: Target, duration_s: float, **plan: Any) -> list[str]:
    bounds = Bounds(min_slope_s=0)
    chosen = Plan(duration_s=duration_s, concurrency=6, seed=SEED_OF_SIX, **plan)
    seen = await bench.soak(target, chosen, bounds)
    return [finding.what for finding in findings(seen, bounds)]


@pytest.mark.exhaustive
async def test_faulty_streams_are_found() -> None:
    """Of a server given by its address."""
    faults = "--fault lose:5 --fault-share 0.8 --refuse-share 0.3"
    with synthetic_server(f"{QUICK} {faults}") as faulty:
        given = given_server(faulty.base_url)
        assert given.kill is None
        (process,) = given.family().values()
        assert process.pid == faulty.family()["synthetic"].pid
        found = await whats(given, 0.5)
    for fault in ("text_differs", "refused"):
        assert any(what.startswith(fault) for what in found), found


@pytest.mark.exhaustive
async def test_a_leak_is_found() -> None:
    with synthetic_server(f"{QUICK} --leak-bytes 1000000") as leaking:
        assert await whats(leaking, 5.0) == ["memory of synthetic"]


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        (("--base-url", "http://127.0.0.1:1", "--kills"), "--kills is for a server that soak"),
        (("--base-url", "http://127.0.0.1:1", "--attack"), "--attack is for a server that soak"),
        (("--attack", "--no-kills"), "--attack is for a server that soak starts, and needs kills"),
        (
            ("--base-url", "http://127.0.0.1:1", "--serve-flags", "x"),
            "--serve-flags is for a penstock server",
        ),
        (("--base-url", "http://127.0.0.1:1"), "GET /v1/models lists no model"),
        (("--base-url", "https://127.0.0.1:1"), "soak needs plain http://host:port"),
        (("--minutes", "0"), "--minutes and --concurrency must be"),
    ],
)
def test_settings_without_sense_are_refused(
    penstock: Penstock, tmp_path: Path, flags: tuple[str, ...], fault: str
) -> None:
    done = penstock("bench", "soak", *flags, "--out", str(tmp_path))
    assert done.returncode == 2
    assert fault in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.exhaustive
@pytest.mark.process_kills
def test_the_demo_model_is_clean_for_a_moment(penstock: Penstock, tmp_path: Path) -> None:
    # Memory has its say in longer runs: the first seconds of a server are all warm-up.
    flags = ("--minutes", "0.1", "--max-memory-growth", "1e9", "--seed", str(SEED))
    done = penstock("bench", "soak", *flags, "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "soak.json").read_text())
    names = {each["name"] for each in report["samples"][0]["processes"]}
    # The engine's template comes in a moment without work.
    assert names | {"template"} == {"supervisor", "gateway", "engine", "template"}
    assert sum(row["ended"] for row in report["streams"]) > 20
