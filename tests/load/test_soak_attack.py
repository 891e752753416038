"""An attack, its measure, and what a server must make of it, on the synthetic server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import orjson
import psutil
import pytest

from penstock.gateway.errors import RequestRefusedError
from penstock.gateway.generation.images.fetch import ImageFetcher
from penstock.load.launch import freeze
from penstock.load.soak import attack, expensive, traffic
from penstock.load.soak.command import Plan, soak
from penstock.load.soak.journal import Journal, Kind
from penstock.load.soak.scene import open_scene
from penstock.load.soak.target import LogPipe, dripping_host
from penstock.load.soak.verdict import Bounds, findings
from penstock.load.soak.verdict import costs as costs_of

from ..support.synthetic_target import ROOT, SOAK_SYNTHETIC, synthetic_server


@pytest.fixture
def sleeper() -> Iterator[psutil.Process]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield psutil.Process(process.pid)
        process.kill()


async def becomes(process: psutil.Process, status: str) -> None:
    async with asyncio.timeout(30):
        while process.status() != status:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.exhaustive
@pytest.mark.process_kills
async def test_what_was_frozen_wakes_whatever_happens(sleeper: psutil.Process) -> None:
    before = psutil.Process().children()
    await freeze(sleeper, 0.1)
    await becomes(sleeper, psutil.STATUS_SLEEPING)
    freezing = asyncio.create_task(freeze(sleeper, 60))
    await becomes(sleeper, psutil.STATUS_STOPPED)
    freezing.cancel()
    await asyncio.gather(freezing, return_exceptions=True)
    await becomes(sleeper, psutil.STATUS_SLEEPING)
    assert psutil.Process().children() == before


@pytest.mark.exhaustive
@pytest.mark.process_kills
async def test_a_bench_that_is_killed_leaves_nothing_frozen(sleeper: psutil.Process) -> None:
    code = "import asyncio, psutil, sys; from penstock.load.launch import freeze; "
    code += "asyncio.run(freeze(psutil.Process(int(sys.argv[1])), 1))"
    with subprocess.Popen([sys.executable, "-c", code, str(sleeper.pid)]) as bench:  # noqa: ASYNC220
        await becomes(sleeper, psutil.STATUS_STOPPED)
        bench.kill()
    await becomes(sleeper, psutil.STATUS_SLEEPING)


@pytest.mark.parametrize("kind", expensive.BODIES)
def test_what_is_expensive_has_its_size_and_never_comes_twice(kind: Kind) -> None:
    one, other = (orjson.dumps(expensive.BODIES[kind](number)) for number in range(2))
    assert one != other
    sizes = {
        Kind.PLAIN_TEXT: 250_000,
        Kind.TOOL_SCHEMAS: 215_000,
        Kind.RESPONSE_FORMATS: 151_000,
        Kind.DEEP_SCHEMAS: 100_000,
        Kind.TINY_MESSAGES: 131_072,
    }
    assert len(one) == pytest.approx(sizes[kind], rel=0.15)


async def test_a_dripping_host_never_ends() -> None:
    with dripping_host() as address:
        fetcher = ImageFetcher([address], max_bytes=1 << 20, timeout_s=60)
        with pytest.raises(RequestRefusedError, match="chunks"):
            await fetcher.fetch(f"http://{address}/x.png", param="x")


def test_a_log_that_is_not_read_fills_and_is_read_later() -> None:
    with LogPipe.opened() as log:
        os.set_blocking(log.write_end, False)
        num_bytes = 0
        assert not log.is_full
        with log.unread():
            with contextlib.suppress(BlockingIOError):
                while True:
                    num_bytes += os.write(log.write_end, b"x" * 100)
            assert log.is_full
        os.set_blocking(log.write_end, True)
        os.write(log.write_end, b"x" * 3000)  # as soon as the rest was read
    assert num_bytes > 2000


@pytest.mark.exhaustive
@pytest.mark.process_kills
async def test_a_stream_of_a_frozen_server_is_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "_PATIENCE_S", 0.2)
    journal = Journal()
    with synthetic_server("--ttft-ms 10 --itl-ms 20") as target:
        async with open_scene(target.base_url, journal, api_key=None) as scene:
            streams = [
                asyncio.create_task(actor(scene, random.Random(seed)))
                for actor in (traffic.resume_sse, traffic.resume_socket)
                for seed in range(4)
            ]
            await asyncio.sleep(0.5)
            await freeze(target.family()["synthetic"], 1.0)
            await asyncio.gather(*streams)
    assert [outcome.faults for outcome in journal.outcomes] == [()] * 8


@pytest.mark.exhaustive
@pytest.mark.process_kills
async def test_every_kind_is_applied_and_its_cost_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The synthetic server takes trailers without end and lets silent connections be: both are
    found, and nothing else that a busy machine could not have done."""
    for name, value in (
        ("FREEZES_S", (1.0,)), ("REST_S", 0.1), ("CALM_S", 1.0), ("NUM_BURSTS", 1),
        ("FLOOD_S", 2.0), ("NUM_PIPELINED", 5000), ("MAX_TRAILER_BYTES", 100_000),
        ("NUM_CONNECTIONS", 50), ("NUM_SILENT", 3), ("SILENT_FOR_S", 1.0), ("NUM_RESUMED", 1),
        ("RESUMED_TOKENS", range(600, 601)), ("TRAILERS_FOR_S", 0.5),
    ):  # fmt: skip
        monkeypatch.setattr(attack, name, value)
    monkeypatch.setattr(expensive, "FOR_S", 0.5)
    monkeypatch.setattr(expensive, "NUM_GRAMMARS", 3)
    with synthetic_server("--ttft-ms 10 --itl-ms 2") as target:
        plan = Plan(duration_s=1, concurrency=1, seed=0, kinds=attack.kinds_of(target))
        seen = await soak(target, plan, Bounds())
        kinds = [*seen.kinds]
    assert kinds == [
        Kind.CALM, Kind.KILL, Kind.LARGE_PROMPTS, Kind.SILENCE, Kind.PIPELINE, Kind.CONNECTIONS,
        Kind.TRAILERS, Kind.PLAIN_TEXT, Kind.TOOL_SCHEMAS, Kind.RESPONSE_FORMATS,
        Kind.DEEP_SCHEMAS, Kind.TINY_MESSAGES, Kind.GRAMMARS, Kind.FREEZE,
    ]  # fmt: skip
    costs = {cost.kind: cost for cost in costs_of(seen)}
    assert all(cost.num_times > 0 for cost in costs.values())
    assert costs[Kind.FREEZE].largest_gap_s is not None
    assert costs[Kind.CALM].health_p99_s is not None
    assert any(outcome.actor == "steady" for outcome in seen.journal.outcomes)
    whats = {finding.what for finding in findings(seen, Bounds())}
    assert {Kind.TRAILERS, Kind.SILENCE} <= whats
    assert not any("never happened" in what for what in whats)


@pytest.mark.exhaustive
async def test_an_attack_may_be_a_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attack, "REST_S", 0.0)
    monkeypatch.setattr(expensive, "FOR_S", 0.1)
    parts = (Kind.PLAIN_TEXT, Kind.TINY_MESSAGES)
    with synthetic_server("--ttft-ms 10 --itl-ms 2") as target:
        plan = Plan(duration_s=0.5, concurrency=1, seed=0, kinds=attack.kinds_of(target, parts))
        seen = await soak(target, plan, Bounds())
    assert tuple(seen.kinds) == parts
    assert {each.kind for each in seen.journal.adversities} == {*parts}


@pytest.mark.exhaustive
@pytest.mark.process_kills
def test_a_soak_that_is_terminated_leaves_nothing(tmp_path: Path) -> None:
    command = [*SOAK_SYNTHETIC, "", "--attack", "--out", str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as bench:
        assert bench.stdout is not None
        bench.stdout.readline()  # its title: the server runs
        family = psutil.Process(bench.pid).children(recursive=True)
        while len(family) < 2:  # the server and the prober
            time.sleep(0.05)
            family = psutil.Process(bench.pid).children(recursive=True)
        bench.terminate()
        _, alive = psutil.wait_procs(family, timeout=60)
    assert alive == []
    assert bench.returncode != 0
    assert list(tmp_path.iterdir()) == []
