"""What dies comes back, an end is said by the exit code, and a stop lets streams finish."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from ..redis_server import RedisServer
from .processes import (
    END_S,
    ENDLESS_TOKENS,
    PENSTOCK,
    Served,
    launch,
    serve,
    suspended,
    wait_gone,
    wait_until,
)

_ENGINE, _GATEWAY = "penstock-engine", "penstock-gateway"
_HELLO = {"model": "demo", "prompt": "Hello", "max_tokens": 4}
# Longer than a test, of a model that has room for it: only a stop ends it.
_ENDLESS = {**_HELLO, "max_tokens": ENDLESS_TOKENS, "ignore_eos": True, "stream": True}
_BACK_S = 90.0  # a start on a machine that does much else


@pytest.fixture
def temporary_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where servers of this test make their folders; short enough for a socket's path."""
    with tempfile.TemporaryDirectory() as name:
        monkeypatch.setenv("TMPDIR", name)
        yield Path(name)


def generate(served: Served) -> None:
    """A new request is served."""
    response = httpx.post(f"{served.base_url}/v1/completions", json=_HELLO, timeout=_BACK_S)
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["completion_tokens"] > 0


def is_ready(served: Served) -> bool:
    return httpx.get(f"{served.base_url}/ready", timeout=_BACK_S).status_code == 200


def wait_back(served: Served, line: str) -> None:
    wait_until(lambda: line in served.log.read_text(), timeout_s=_BACK_S)


def test_a_killed_engine_comes_back_and_the_gateway_stays(
    temporary_folder: Path, tmp_path: Path
) -> None:
    with serve(log=tmp_path / "log") as served:
        engine, gateway = served.child(_ENGINE), served.child(_GATEWAY)
        with suspended(psutil.Process(served.process.pid)):  # no other starts before we looked
            engine.kill()
            wait_until(lambda: not is_ready(served))
        wait_back(served, "penstock: the engine is back after ")
        wait_until(lambda: is_ready(served))
        generate(served)
        served.renew_family()
        assert served.child(_ENGINE).pid != engine.pid
        assert served.child(_GATEWAY).pid == gateway.pid
        log = served.log.read_text()
        assert log.count("penstock: the engine died (SIGKILL); restarting\n") == 1
        assert served.stop() == 0
        wait_gone(served.family)
    assert list(temporary_folder.iterdir()) == []


def test_while_a_killed_gateway_is_away_connections_wait(tmp_path: Path) -> None:
    with serve(log=tmp_path / "log") as served:
        engine = served.child(_ENGINE)
        served.child(_GATEWAY).kill()
        generate(served)
        assert "penstock: the gateway died (SIGKILL); restarting" in served.log.read_text()
        wait_back(served, "penstock: the gateway is back after ")
        served.renew_family()
        assert served.child(_ENGINE).pid == engine.pid
        assert served.stop() == 0
        wait_gone(served.family)


def test_all_children_killed_again_and_again_come_back(tmp_path: Path) -> None:
    with serve("--log-format", "json", log=tmp_path / "log") as served:
        for number in range(1, 4):
            family = served.renew_family()
            for child in family:
                child.kill()
            for label in ("engine", "gateway"):
                wait_until(
                    lambda: served.log.read_text().count(f"the {label} is back") == number,  # noqa: B023
                    timeout_s=_BACK_S,
                )
        generate(served)
        served.renew_family()
        assert served.stop() == 0
        wait_gone(served.family)
        entries = [json.loads(line) for line in served.log.read_text().splitlines()]
        deaths = [entry for entry in entries if "died (SIGKILL)" in entry["message"]]
        assert len(deaths) == 6
        assert {entry["logger"] for entry in deaths} == {"penstock"}
        assert {entry["level"] for entry in deaths} == {"error"}
        assert any("restarting in " in entry["message"] for entry in deaths), "ever later"


def test_an_engine_that_never_comes_back_ends_the_command(tmp_path: Path) -> None:
    with serve(log=tmp_path / "log") as served:
        supervisor = psutil.Process(served.process.pid)
        gateway = served.child(_GATEWAY)
        deadline_s = time.monotonic() + _BACK_S
        while served.process.poll() is None and time.monotonic() < deadline_s:
            for child in supervisor.children():
                if child != gateway:
                    with contextlib.suppress(psutil.NoSuchProcess):  # it has ended by itself
                        child.kill()
            time.sleep(0.05)
        assert served.process.poll() == 1
        log = served.log.read_text()
        assert "the engine does not come back; it died 5 times before it was ready" in log
        wait_gone([gateway])


def test_what_a_killed_supervisor_leaves_is_removed_by_the_next(
    temporary_folder: Path, tmp_path: Path
) -> None:
    with serve(log=tmp_path / "log") as served:
        served.process.kill()
        served.process.wait()
        wait_gone(served.family)
    (left,) = temporary_folder.iterdir()
    (temporary_folder / "penstock-of-somebody-else").mkdir()
    with serve(log=tmp_path / "log") as first:
        assert not left.exists()
        with serve(log=tmp_path / "log2") as second:
            generate(first)
            generate(second)
            assert second.stop() == 0
        generate(first)
        assert first.stop() == 0
    assert [path.name for path in temporary_folder.iterdir()] == ["penstock-of-somebody-else"]


async def test_a_stop_lets_a_stream_finish_and_takes_nothing_new(tmp_path: Path) -> None:
    story = {**_ENDLESS, "max_tokens": 400}
    with serve("--shutdown-grace-s", "60", log=tmp_path / "log") as served:
        async with httpx.AsyncClient(base_url=served.base_url, timeout=_BACK_S) as client:
            assert (await client.get("/ready")).status_code == 200  # a connection to keep
            async with client.stream("POST", "/v1/completions", json=story) as response:
                lines = response.aiter_lines()
                await anext(lines)
                served.process.send_signal(signal.SIGTERM)
                rest = [line async for line in lines if line]
        *_, finish, last = rest
        assert json.loads(finish.removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert last == "data: [DONE]"
        assert await asyncio.to_thread(served.process.wait, END_S) == 0
        wait_gone(served.family)
        async with httpx.AsyncClient(timeout=_BACK_S) as client:
            with pytest.raises(httpx.ConnectError):
                await client.get(f"{served.base_url}/health")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_second_signal_ends_at_once(
    number: int, long_model: tuple[str, ...], tmp_path: Path
) -> None:
    with serve(*long_model, "--shutdown-grace-s", "600", log=tmp_path / "log") as served:
        async with (
            httpx.AsyncClient(base_url=served.base_url, timeout=_BACK_S) as client,
            client.stream("POST", "/v1/completions", json=_ENDLESS) as response,
        ):
            lines = response.aiter_lines()  # held: without it, the connection closes
            await anext(lines)
            served.process.send_signal(number)
            wait_until(lambda: "a second signal ends them" in served.log.read_text())
            assert served.process.poll() is None
            served.process.send_signal(number)
            assert await asyncio.to_thread(served.process.wait, END_S) == 1, "streams were cut"
        wait_gone(served.family)


def test_two_signals_during_start_end_it_at_once(tmp_path: Path) -> None:
    process = launch([], tmp_path / "log")
    parent = psutil.Process(process.pid)
    wait_until(lambda: len(parent.children()) == 2)
    family = parent.children()
    family[0].suspend()  # it would not hear SIGTERM
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: "stopping" in (tmp_path / "log").read_text())
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=END_S) == 1
    wait_gone(family)
    process.communicate()


def test_secrets_are_in_no_list_of_processes_and_no_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_SSL_KEYFILE_PASSWORD", "hunter2-in-environment")
    with serve(
        "--api-key", "hunter2-on-line", "--log-level", "debug", log=tmp_path / "log"
    ) as served:
        processes = [psutil.Process(served.process.pid), *served.family]
        for process in processes:
            assert "hunter2" not in " ".join(process.cmdline())
        for process in served.family:
            assert "hunter2" not in Path(f"/proc/{process.pid}/environ").read_text()
        assert processes[0].name() == "penstock"
        headers = {"authorization": "Bearer hunter2-on-line"}
        url = f"{served.base_url}/v1/models"
        assert httpx.get(url, timeout=_BACK_S).status_code == 401
        assert httpx.get(url, headers=headers, timeout=_BACK_S).status_code == 200
        assert served.stop() == 0
    assert "hunter2" not in served.log.read_text()


def test_several_gateways_need_redis() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PENSTOCK_REDIS_URL"}
    result = subprocess.run(
        [PENSTOCK, "serve", "--port", "0", "--api-workers", "2"],
        capture_output=True,
        text=True,
        timeout=END_S,
        env=environment,
    )
    assert result.returncode == 2
    assert result.stderr == (
        "penstock: error: --api-workers 2 needs --redis-url: "
        "gateways share their state through Redis; see penstock serve --help\n"
    )


@pytest.mark.redis
def test_of_several_gateways_one_is_killed_and_the_rest_serve_on(tmp_path: Path) -> None:
    with (
        RedisServer(tmp_path / "redis", password="hunter2") as redis,
        serve("--api-workers", "2", "--redis-url", redis.url, log=tmp_path / "log") as served,
    ):
        gateways = [child for child in served.family if child.name() == _GATEWAY]
        assert len(gateways) == 2
        assert len(served.family) == 3
        gateways[0].kill()
        for _ in range(5):
            generate(served)
        log = served.log.read_text
        wait_until(lambda: "is back after " in log(), timeout_s=_BACK_S)
        assert "penstock: gateway 0 died (SIGKILL); restarting" in log()
        assert "penstock: gateway 0 is back after " in log()
        served.renew_family()
        assert gateways[1] in served.family
        assert len(served.family) == 3
        # One that ends as asked is still one that is to run.
        gateways[1].terminate()
        wait_until(lambda: "penstock: gateway 1 is back after " in log(), timeout_s=_BACK_S)
        served.renew_family()
        assert served.stop() == 0
        wait_gone(served.family)
        assert "hunter2" not in log()
