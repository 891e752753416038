"""What dies comes back, an end is said by the exit code, and a stop lets streams finish."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import signal
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
    Served,
    children,
    serve,
    suspended,
    wait_gone,
    wait_until,
)

_ENGINE, _GATEWAY = "penstock-engine", "penstock-gateway"
_HELLO = {"model": "demo", "prompt": "Hello", "max_tokens": 4}
# Longer than a test, of a model that has room for it: only a stop ends it.
_ENDLESS = {**_HELLO, "max_tokens": ENDLESS_TOKENS, "ignore_eos": True, "stream": True}
_AUTHORIZATION = {"authorization": "Bearer hunter2-on-line"}


def generate(served: Served, **headers: str) -> None:
    """A new request is served."""
    url = f"{served.base_url}/v1/completions"
    response = httpx.post(url, json=_HELLO, headers=headers, timeout=END_S)
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["completion_tokens"] > 0


def wait_back(served: Served, label: str) -> None:
    line = f"the {label} is back after "
    wait_until(lambda: line in served.log.read_text())


@pytest.mark.process_kills
def test_each_process_is_killed_and_comes_back_and_none_outlives_the_supervisor(
    tmp_path: Path,
) -> None:
    with serve("--log-format", "json", log=tmp_path / "first") as served:
        engine, gateway = served.child(_ENGINE), served.child(_GATEWAY)
        template = served.child("penstock-template")
        with suspended(psutil.Process(served.process.pid)):  # no other starts before we looked
            engine.kill()
            wait_until(lambda: not served.is_ready())
        wait_back(served, "engine")
        wait_until(served.is_ready)
        generate(served)
        assert served.child(_ENGINE).pid == template.pid, "it did not start from nothing"
        assert served.child(_GATEWAY).pid == gateway.pid

        engine = served.child(_ENGINE)
        gateway.kill()
        generate(served)  # its connection waits
        wait_back(served, "gateway")
        assert served.child(_ENGINE).pid == engine.pid

        entries = [json.loads(line) for line in served.log.read_text().splitlines()]
        deaths = [entry for entry in entries if "died (SIGKILL)" in entry["message"]]
        assert [entry["message"] for entry in deaths] == [
            "the engine died (SIGKILL); restarting", "the gateway died (SIGKILL); restarting",
        ]  # fmt: skip
        assert {(entry["logger"], entry["level"]) for entry in deaths} == {("penstock", "error")}

        left = folder_of(served)
        served.renew_family()
        served.process.kill()
        served.process.wait()
        wait_gone(served.family)
    assert left.exists()
    with other_folders() as others:
        with serve(log=tmp_path / "second") as following:
            assert not left.exists()
            assert all(each.exists() for each in others)
            own = folder_of(following)
            generate(following)
            assert following.stop() == 0
        assert not own.exists()


def folder_of(served: Served) -> Path:
    """Where its engine listens."""
    files = psutil.Process(served.process.pid).open_files()
    (lock,) = [Path(file.path) for file in files if Path(file.path).name == "lock"]
    return lock.parent


@contextlib.contextmanager
def other_folders() -> Iterator[list[Path]]:
    """Of a server that runs, and of somebody else."""
    with contextlib.ExitStack() as stack:
        names = (tempfile.TemporaryDirectory(prefix="penstock-") for _ in range(2))
        folders = [Path(stack.enter_context(name)) for name in names]
        lock = stack.enter_context((folders[0] / "lock").open("w"))
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folders


@pytest.mark.process_kills
@pytest.mark.exhaustive
def test_an_engine_that_never_comes_back_ends_the_command(tmp_path: Path) -> None:
    with serve(log=tmp_path / "log") as served:
        supervisor = psutil.Process(served.process.pid)
        gateway = served.child(_GATEWAY)
        deadline_s = time.monotonic() + END_S
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


async def test_a_stop_lets_a_stream_finish_and_takes_nothing_new(tmp_path: Path) -> None:
    story = {**_ENDLESS, "max_tokens": 400}
    with serve("--shutdown-grace-s", "60", log=tmp_path / "log") as served:
        async with httpx.AsyncClient(base_url=served.base_url, timeout=END_S) as client:
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
        async with httpx.AsyncClient(timeout=END_S) as client:
            with pytest.raises(httpx.ConnectError):
                await client.get(f"{served.base_url}/health")


@pytest.mark.process_kills
@pytest.mark.exhaustive
async def test_a_second_signal_ends_at_once(long_model: tuple[str, ...], tmp_path: Path) -> None:
    with serve(*long_model, "--shutdown-grace-s", "600", log=tmp_path / "log") as served:
        async with (
            httpx.AsyncClient(base_url=served.base_url, timeout=END_S) as client,
            client.stream("POST", "/v1/completions", json=_ENDLESS) as response,
        ):
            lines = response.aiter_lines()  # held: without it, the connection closes
            await anext(lines)
            served.process.send_signal(signal.SIGTERM)
            wait_until(lambda: "a second signal ends them" in served.log.read_text())
            assert served.process.poll() is None
            served.process.send_signal(signal.SIGINT)
            assert await asyncio.to_thread(served.process.wait, END_S) == 1, "streams were cut"
        wait_gone(served.family)


@pytest.mark.redis
@pytest.mark.process_kills
@pytest.mark.exhaustive
def test_of_several_gateways_one_is_killed_and_the_rest_serve_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nobody sees their secrets."""
    monkeypatch.setenv("PENSTOCK_SSL_KEYFILE_PASSWORD", "hunter2-in-environment")
    with (
        RedisServer(tmp_path / "redis", password="hunter2", appends=False) as redis,
        serve(
            *("--api-workers", "2", "--redis-url", redis.url),
            *("--api-key", "hunter2-on-line", "--log-level", "debug"),
            log=tmp_path / "log",
        ) as served,
    ):
        _check_secrets(served)
        gateways = children(served.process, _GATEWAY)
        assert len(gateways) == 2
        assert len(served.family) == 4, "and an engine with its template"
        gateways[0].kill()
        for _ in range(5):
            generate(served, **_AUTHORIZATION)
        log = served.log.read_text
        wait_until(lambda: "is back after " in log())
        assert "penstock: gateway 0 died (SIGKILL); restarting" in log()
        assert "penstock: gateway 0 is back after " in log()
        served.renew_family()
        assert gateways[1] in served.family
        assert len(served.family) == 4
        # One that ends as asked is still one that is to run.
        gateways[1].terminate()
        wait_until(lambda: "penstock: gateway 1 is back after " in log())
        served.renew_family()
        assert served.stop() == 0
        wait_gone(served.family)
        assert "hunter2" not in log()


def _check_secrets(served: Served) -> None:
    """They are in no list of processes and no environment, and open what they are for."""
    processes = [psutil.Process(served.process.pid), *served.family]
    for process in processes:
        assert "hunter2" not in " ".join(process.cmdline())
    for process in served.family:
        assert "hunter2" not in Path(f"/proc/{process.pid}/environ").read_text()
    assert processes[0].name() == "penstock"
    url = f"{served.base_url}/v1/models"
    assert httpx.get(url, timeout=END_S).status_code == 401
    assert httpx.get(url, headers=_AUTHORIZATION, timeout=END_S).status_code == 200
