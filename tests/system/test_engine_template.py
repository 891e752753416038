"""An engine that died comes out of its template; and as the first time, where there is none."""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest

from .processes import END_S, Served, children, serve, suspended, wait_gone, wait_until

pytestmark = [pytest.mark.process_kills, pytest.mark.exhaustive]

_NUM_STREAMS = 32
_STORY = {
    "model": "demo",
    "prompt": "Once upon a time",
    "max_tokens": 400,
    "ignore_eos": True,
    "temperature": 0,
    "stream": True,
}
_ENGINE, _TEMPLATE = "penstock-engine", "penstock-template"


def only(served: Served, name: str) -> psutil.Process:
    wait_until(lambda: len(children(served.process, name)) == 1)
    return served.child(name)


async def read(client: httpx.AsyncClient, on_begin: Callable[[], None]) -> str:
    """A stream's text; `on_begin` is called at its first token."""
    pieces: list[str] = []
    async with client.stream("POST", "/v1/completions", json=_STORY) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                pieces.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
                if len(pieces) == 1:
                    on_begin()
    return "".join(pieces)


async def outlive(served: Served, strike: Callable[[], None]) -> psutil.Process:
    """Strike when all streams run, each of which must be what it would have been; the engine that
    is then there, with a template beside it that waits."""
    num_back = served.log.read_text().count("the engine is back after ")
    num_running = 0

    def begin() -> None:
        nonlocal num_running
        num_running += 1
        if num_running == _NUM_STREAMS:
            strike()

    limits = httpx.Limits(max_connections=_NUM_STREAMS)
    base_url = served.base_url
    async with httpx.AsyncClient(base_url=base_url, limits=limits, timeout=END_S) as client:
        expected = await read(client, lambda: None)
        texts = await asyncio.gather(*(read(client, begin) for _ in range(_NUM_STREAMS)))
    assert set(texts) == {expected}
    log = served.log.read_text
    await asyncio.to_thread(
        wait_until, lambda: log().count("the engine is back after ") == num_back + 1
    )
    await asyncio.to_thread(only, served, _TEMPLATE)
    return only(served, _ENGINE)


async def test_streams_outlive_engines_that_come_out_of_templates(tmp_path: Path) -> None:
    with serve("--dtype", "float32", log=tmp_path / "log") as served:
        for number in range(2):  # the second template comes from the first
            engine, template = only(served, _ENGINE), only(served, _TEMPLATE)
            assert template.num_threads() == 1
            assert not template.net_connections(kind="inet")
            after = await outlive(served, engine.kill)
            assert after.pid == template.pid
            assert only(served, _TEMPLATE).pid != template.pid
            if number == 0:
                assert " KV blocks of the engine before" in served.log.read_text()
        family = served.renew_family()
        assert served.stop() == 0
        wait_gone(family)


async def test_without_a_template_an_engine_starts_as_the_first_time(tmp_path: Path) -> None:
    with serve("--dtype", "float32", log=tmp_path / "log") as served:
        template = only(served, _TEMPLATE)
        template.kill()
        wait_until(lambda: not psutil.pid_exists(template.pid))  # it was reaped
        before = only(served, _ENGINE)
        engine = await outlive(served, before.kill)
        assert engine.pid != template.pid
        template = only(served, _TEMPLATE)

        def kill_both() -> None:
            with suspended(psutil.Process(served.process.pid)):
                engine.kill()
                template.kill()

        engine = await outlive(served, kill_both)
        assert engine.pid != template.pid


async def test_a_template_that_dies_on_its_way_to_be_the_engine(tmp_path: Path) -> None:
    """It has got its order, and never does what it says."""
    with serve("--dtype", "float32", log=tmp_path / "log") as served:
        engine, template = only(served, _ENGINE), only(served, _TEMPLATE)
        log = served.log.read_text

        async def kill_late() -> None:
            await asyncio.to_thread(wait_until, lambda: "died (SIGKILL); restarting" in log())
            template.kill()

        def strike() -> None:
            template.suspend()
            engine.kill()

        late = asyncio.create_task(kill_late())
        after = await outlive(served, strike)
        await late
        assert after.pid != template.pid
        assert log().count("died (SIGKILL); restarting") == 2


async def test_a_template_that_is_stopped(tmp_path: Path) -> None:
    with serve("--dtype", "float32", log=tmp_path / "log") as served:
        engine, template = only(served, _ENGINE), only(served, _TEMPLATE)

        def strike() -> None:
            template.suspend()
            engine.kill()

        after = await outlive(served, strike)
        assert after.pid != template.pid
        assert not psutil.pid_exists(template.pid)


async def test_a_template_without_memory_for_an_engine(tmp_path: Path) -> None:
    with serve("--dtype", "float32", log=tmp_path / "log") as served:
        engine, template = only(served, _ENGINE), only(served, _TEMPLATE)
        template.rlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20))  # no page more than it has
        after = await outlive(served, engine.kill)
        assert after.pid != template.pid
        assert served.log.read_text().count("restarting") == 2


def test_an_end_of_the_supervisor_is_one_of_the_template(tmp_path: Path) -> None:
    with serve(log=tmp_path / "log") as served:
        only(served, _TEMPLATE)
        family = served.renew_family()
        assert len(family) == 3
        served.process.kill()
        served.process.wait()
        wait_gone(family)
