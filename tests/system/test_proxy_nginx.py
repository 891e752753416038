"""nginx in front, as it is usually set up: streams pass as they come, and silence is survived."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import websockets

from .processes import END_S, ENDLESS_TOKENS, Served, free_port, serve, wait_until

pytestmark = pytest.mark.nginx

_PING_S = 0.1
_IDLE_S = 3  # of nginx: it cuts what is silent for so long
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
        proxy_http_version 1.1;
        proxy_set_header Host 127.0.0.1;
        proxy_set_header Upgrade $http_upgrade;
        proxy_set_header Connection $connection_upgrade;
        proxy_read_timeout {idle_s}s;
        proxy_send_timeout {idle_s}s;
        location / {{ proxy_pass {upstream}; }}
        location = /silent {{ proxy_pass {silent}; }}
    }}
}}
"""
_BODY = {"model": "demo", "input": "Tell me a story.", "ignore_eos": True, "temperature": 0}


@contextmanager
def nginx(upstream: str, directory: Path) -> Iterator[str]:
    """A proxy before a server, and at `/silent` before one that never answers; its base URL."""
    directory.mkdir()
    port = free_port()
    program = shutil.which("nginx")
    assert program is not None
    configuration, log = directory / "nginx.conf", directory / "error.log"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        settings: dict[str, Any] = {"directory": directory, "port": port, "upstream": upstream}
        settings |= {"silent": f"http://127.0.0.1:{silent.getsockname()[1]}", "idle_s": _IDLE_S}
        configuration.write_text(_CONFIGURATION.format(**settings))
        process = subprocess.Popen([program, "-p", directory, "-c", configuration, "-e", log])
        try:
            wait_until(lambda: process.poll() is not None or _listens(port))
            assert process.poll() is None, log.read_text()
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(timeout=END_S)


def _listens(port: int) -> bool:
    with closing(socket.socket()) as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def served(
    long_model: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """One that answers one at a time."""
    log = tmp_path_factory.mktemp("server") / "log"
    flags = ("--ping-interval-s", str(_PING_S), "--max-num-seqs", "1")
    with serve(*long_model, *flags, log=log) as found:
        yield found


@pytest.fixture(scope="module")
def proxy(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with nginx(served.base_url, tmp_path_factory.mktemp("proxy") / "nginx") as url:
        yield url


async def _what_is_silent_is_cut(proxy: str) -> None:
    """As long as the proxy has patience with a connection, and a moment longer."""
    async with httpx.AsyncClient(base_url=proxy, timeout=END_S) as client:
        assert (await client.get("/silent")).status_code == 504


@asynccontextmanager
async def _occupied(served: Served) -> AsyncIterator[None]:
    """The one place of the server is taken: whoever asks now waits until this ends."""
    body = {**_BODY, "stream": True, "max_output_tokens": ENDLESS_TOKENS, "store": False}
    async with (
        httpx.AsyncClient(base_url=served.base_url, timeout=END_S) as client,
        client.stream("POST", "/v1/responses", json=body) as response,
    ):
        lines = response.aiter_lines()  # held: without it, the connection closes
        while "output_text.delta" not in await anext(lines):
            pass
        yield


@pytest.mark.exhaustive
async def test_events_pass_as_they_come_and_silence_is_survived_over_sse(
    served: Served, proxy: str
) -> None:
    """What is there is here before there is more, which a proxy that buffers would wait for; and
    what comes is longer away than this one has patience."""
    assert urlsplit(proxy).port != urlsplit(served.base_url).port
    body = {**_BODY, "stream": True, "max_output_tokens": 400}
    lines, early = list[str](), list[str]()
    async with (
        httpx.AsyncClient(base_url=proxy, timeout=END_S) as client,
        AsyncExitStack() as stack,
    ):
        occupied = await stack.enter_async_context(AsyncExitStack())
        await occupied.enter_async_context(_occupied(served))
        response = await stack.enter_async_context(
            client.stream("POST", "/v1/responses", json=body)
        )
        assert response.status_code == 200, await response.aread()
        silence = asyncio.create_task(_what_is_silent_is_cut(proxy))
        async for line in response.aiter_lines():
            lines += [line] if line else []
            if not early and silence.done():
                silence.result()
                early = lines.copy()
                await occupied.aclose()
    assert early[0] == "event: response.created"
    assert early[-1] == ": ping"
    assert not any("output_text.delta" in line for line in early)
    assert lines[-2] == "event: response.incomplete"


@pytest.mark.exhaustive
async def test_silence_is_survived_over_a_websocket(proxy: str) -> None:
    """An idle connection that is asked again."""
    address = proxy.replace("http", "ws") + "/v1/responses"
    async with websockets.connect(address, open_timeout=END_S, ping_interval=None) as socket:
        for _ in range(2):
            message: dict[str, Any] = {"type": "response.create", **_BODY, "max_output_tokens": 5}
            await socket.send(json.dumps(message))
            event = {"type": ""}
            while event["type"] != "response.incomplete":
                event = json.loads(await asyncio.wait_for(socket.recv(), END_S))
                assert event["type"] != "error", event
            await _what_is_silent_is_cut(proxy)
