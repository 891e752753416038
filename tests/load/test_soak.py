"""Whole soaks: clean where nothing is wrong, and not clean where something is."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from penstock.load.bench.soak import Plan, soak
from penstock.load.soak.target import Target, given_server
from penstock.load.soak.verdict import Bounds, findings

from ..support.synthetic_target import ROOT, SOAK_SYNTHETIC, synthetic_server
from .conftest import Penstock

QUICK = "--ttft-ms 10 --itl-ms 2"
# With these every kind of stream that a test asks for is among those that clients begin with, a
# crowd too, so that a slow machine has them all: who has begun is let finish.
SEED, SEED_OF_SIX = 321, 1619


def test_with_resumes_cancels_and_kills_it_is_clean(tmp_path: Path) -> None:
    flags = ("--resumes", "--cancels-by-id", "--minutes", "0.1", "--seed", str(SEED))
    done = subprocess.run(
        [*SOAK_SYNTHETIC, QUICK, *flags, "--out", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Verdict: clean." in done.stdout
    report = json.loads((tmp_path / "soak.json").read_text())
    assert report["is_clean"]
    assert report["kills"]
    streams = {row["actor"]: row for row in report["streams"]}
    for name in ("resume, sse", "resume, websocket", "cancel by id", "read to the end, chat"):
        assert streams[name]["ended"] > streams[name]["faulty"]
    assert {process["name"] for process in report["samples"][0]["processes"]} == {"synthetic"}
    assert (tmp_path / "soak.png").stat().st_size > 10_000
    assert "Verdict: clean." in (tmp_path / "soak.md").read_text()


async def whats(target: Target, **plan: Any) -> list[str]:
    bounds = Bounds(min_slope_s=0)
    seen = await soak(target, Plan(duration_s=5, concurrency=6, seed=SEED_OF_SIX, **plan), bounds)
    return [finding.what for finding in findings(seen, bounds)]


async def test_what_is_wrong_is_found() -> None:
    """Faulty streams of a server given by its address, and a leak, at the same time."""
    faults = "--fault lose:5 --fault-share 0.8 --refuse-share 0.3"
    with (
        synthetic_server(f"{QUICK} {faults}") as faulty,
        synthetic_server(f"{QUICK} --leak-bytes 1000000") as leaking,
    ):
        given = given_server(faulty.base_url)
        assert given.kill is None
        (process,) = given.family().values()
        assert process.pid == faulty.family()["synthetic"].pid
        found, leaks = await asyncio.gather(whats(given, has_resumes=True), whats(leaking))
    for fault in ("text_differs", "refused"):
        assert any(what.startswith(fault) for what in found), found
    assert leaks == ["memory of synthetic"]


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
def test_the_demo_model_is_clean_for_a_moment(penstock: Penstock, tmp_path: Path) -> None:
    # Memory has its say in longer runs: the first seconds of a server are all warm-up.
    flags = ("--minutes", "0.1", "--max-memory-growth", "1e9", "--no-plot", "--seed", str(SEED))
    done = penstock("bench", "soak", *flags, "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "soak.json").read_text())
    assert {each["name"] for each in report["samples"][0]["processes"]} == {
        "supervisor", "gateway", "engine",
    }  # fmt: skip
    assert sum(row["ended"] for row in report["streams"]) > 20
