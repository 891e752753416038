"""nginx in front, as it is usually set up: streams pass as they come, and silence is survived."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import websockets

from .processes import Served, serve, wait_until

pytestmark = pytest.mark.nginx

_PING_S = 0.5
_IDLE_S = 2  # of nginx: it cuts what is silent for so long
_SILENCE_S = 3 * _IDLE_S
_PAUSE_S = 3.5  # of an engine; at 5 s it is taken for dead
# What a user writes who follows nginx's own guides; buffering is on, as by default.
_CONFIGURATION = """
daemon off;
worker_processes 1;
pid {directory}/pid;
error_log {directory}/error.log;
events {{ worker_connections 64; }}
http {{
    access_log off;
    client_body_temp_path {directory}/body;
    proxy_temp_path {directory}/proxy;
    fastcgi_temp_path {directory}/fastcgi;
    uwsgi_temp_path {directory}/uwsgi;
    scgi_temp_path {directory}/scgi;
    map $http_upgrade $connection_upgrade {{ default upgrade; '' ''; }}
    server {{
        listen 127.0.0.1:{port};
        location / {{
            proxy_pass {upstream};
            proxy_http_version 1.1;
            proxy_set_header Host 127.0.0.1;
            proxy_set_header Upgrade $http_upgrade;
            proxy_set_header Connection $connection_upgrade;
            proxy_read_timeout {idle_s}s;
            proxy_send_timeout {idle_s}s;
        }}
    }}
}}
"""
_BODY = {"model": "demo", "input": "Tell me a story.", "ignore_eos": True, "temperature": 0}


@contextmanager
def nginx(upstream: str, directory: Path) -> Iterator[str]:
    """A proxy before a server; its base URL."""
    directory.mkdir()
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    configuration = directory / "nginx.conf"
    configuration.write_text(
        _CONFIGURATION.format(directory=directory, port=port, upstream=upstream, idle_s=_IDLE_S)
    )
    program = shutil.which("nginx")
    assert program is not None
    log = directory / "error.log"
    process = subprocess.Popen([program, "-p", directory, "-c", configuration, "-e", log])
    try:
        wait_until(lambda: process.poll() is not None or _listens(port))
        assert process.poll() is None, log.read_text()
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=10)


def _listens(port: int) -> bool:
    with closing(socket.socket()) as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    log = tmp_path_factory.mktemp("server") / "log"
    with serve("--ping-interval-s", str(_PING_S), log=log) as found:
        yield found


@pytest.fixture(scope="module")
def proxy(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with nginx(served.base_url, tmp_path_factory.mktemp("proxy") / "nginx") as url:
        yield url


async def test_events_pass_as_they_come(served: Served, proxy: str) -> None:
    """They are spread over the time of the answer; a proxy that buffers brings them at its end."""
    async with httpx.AsyncClient(base_url=proxy, timeout=60) as client:
        begun_s, times_s = time.monotonic(), list[float]()
        body = {**_BODY, "stream": True, "max_output_tokens": 600}
        async with client.stream("POST", "/v1/responses", json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    times_s.append(time.monotonic() - begun_s)
    assert urlsplit(proxy).port != urlsplit(served.base_url).port
    assert len(times_s) > 50
    assert times_s[len(times_s) // 4] < 0.6 * times_s[-1]


async def test_silence_is_survived_over_sse(served: Served, proxy: str) -> None:
    """An engine that pauses for longer than the proxy has patience."""
    engine, times_s, lines = served.child("penstock-engine"), list[float](), list[str]()
    body = {**_BODY, "stream": True, "max_output_tokens": 400}
    try:
        async with (
            httpx.AsyncClient(base_url=proxy, timeout=60) as client,
            client.stream("POST", "/v1/responses", json=body) as response,
        ):
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    times_s.append(time.monotonic())
                if line:
                    lines.append(line)
                if len(times_s) == 20:
                    engine.suspend()
                    asyncio.get_running_loop().call_later(_PAUSE_S, engine.resume)
                    times_s.append(time.monotonic())
    finally:
        engine.resume()
    pauses_s = [later - earlier for earlier, later in pairwise(times_s)]
    assert max(pauses_s) > _IDLE_S + 0.5
    assert ": ping" in lines
    assert lines[-2] == "event: response.incomplete"


async def test_silence_is_survived_over_a_websocket(proxy: str) -> None:
    """An idle connection that is asked again."""
    address = proxy.replace("http", "ws") + "/v1/responses"
    async with websockets.connect(address, ping_interval=None) as socket:
        for _ in range(2):
            message: dict[str, Any] = {"type": "response.create", **_BODY, "max_output_tokens": 5}
            await socket.send(json.dumps(message))
            event = {"type": ""}
            while event["type"] != "response.incomplete":
                event = json.loads(await asyncio.wait_for(socket.recv(), 60))
                assert event["type"] != "error", event
            await asyncio.sleep(_SILENCE_S)
