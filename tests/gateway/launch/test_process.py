"""The gateway as a process: settings by pipe, an inherited socket, one status line, no torch."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import websockets

from penstock.engine.config import ModelConfig
from penstock.engine.process.logs import LogWriter
from penstock.engine.text import Tokenizer
from penstock.gateway.app import create_app
from penstock.gateway.config import GatewayConfig
from penstock.gateway.launch.process import _Server, _uvicorn_config

from ..conftest import ANSWER, PATIENCE_S, until
from ..fake_engine import FakeEngine


def test_what_the_gateway_does_not_load() -> None:
    unwanted = (
        "torch",
        "transformers",
        "llguidance",  # a process of its own compiles grammars
        "opentelemetry",
        "requests",
        "penstock.gateway.api.openapi",
    )
    code = (
        "import sys, penstock.gateway.app, penstock.gateway.launch.process\n"
        f"print([name for name in sys.modules if name.startswith({unwanted})])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"


@contextlib.contextmanager
def launched(
    model: str,
    address: str,
    *,
    log: Path | None = None,
    max_files: int | None = None,
    module: str = "penstock.gateway.launch.process",
    **flags: Any,
) -> Iterator[tuple[subprocess.Popen[bytes], int, int]]:
    """The process, its port, and the status pipe's reading end. Its log goes to a file if named."""
    config_read, config_write = os.pipe()
    status_read, status_write = os.pipe()
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        settings: dict[str, Any] = {
            "host": "127.0.0.1",
            "port": 0,
            "engine_address": address,
            "api_key": [],
            "model": asdict(ModelConfig(model=model)),
            "log_level": "info",
            "shutdown_grace_s": 1,
            "header_timeout_s": PATIENCE_S,
            "num_blocks": None,
            **flags,
        }
        command = [sys.executable, "-m", module]
        if max_files is not None:
            command = ["sh", "-c", f'ulimit -n {max_files}; exec "$@"', "sh", *command]
        stderr = None if log is None else stack.enter_context(log.open("wb"))
        process = subprocess.Popen(
            command,
            stderr=stderr,
            pass_fds=[config_read, status_write, listener.fileno()],
            env={
                **os.environ,
                "PENSTOCK_CONFIG_FD": str(config_read),
                "PENSTOCK_STATUS_FD": str(status_write),
                "PENSTOCK_LISTEN_FD": str(listener.fileno()),
                "PENSTOCK_SUPERVISOR_PID": str(os.getpid()),
            },
        )
        os.close(config_read)
        os.close(status_write)
        with os.fdopen(config_write, "wb") as pipe:
            pipe.write(json.dumps(settings).encode())
        try:
            yield process, listener.getsockname()[1], status_read
        finally:
            process.kill()
            process.wait()
            os.close(status_read)


def client_of(port: int) -> httpx.AsyncClient:
    # A connection for each request: one that was idle may be closed just when it is used again.
    fresh = httpx.Limits(max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S, limits=fresh)


async def ending(web: websockets.ClientConnection) -> AsyncIterator[str | bytes]:
    """Messages until the server closes."""
    with contextlib.suppress(websockets.ConnectionClosed):
        while True:
            yield await web.recv()


_ENDLESS = {"prompt": "x", "ignore_eos": True, "stream": True, "max_tokens": 200}


async def test_serves_and_stops(model_path: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    address = f"{tmp_path}/engine.sock"
    with launched(str(model_path), address, shutdown_grace_s=0.2) as (process, port, status_fd):
        async with client_of(port) as http:
            assert (await http.get("/ready")).status_code == 503  # no engine yet
            assert (await http.get("/health")).status_code == 503
            assert (await http.get("/live")).status_code == 200
            async with FakeEngine(address, tokenizer.encode(ANSWER), step_s=0.01) as engine:
                line = await asyncio.to_thread(os.read, status_fd, 1000)
                assert json.loads(line) == {
                    "event": "ready",
                    "formats": "calls hermes (in text)",
                    "place": "in memory, until the server stops",
                }
                assert (await http.get("/ready")).status_code == 200
                response = await http.post("/v1/completions", json={"prompt": "x"})
                assert response.json()["choices"][0]["text"] == ANSWER
                assert "server" not in response.headers
                assert psutil.Process(process.pid).cmdline()[0] == "penstock-gateway"
                assert engine.aborted == set()
                url = f"ws://127.0.0.1:{port}/v1/responses"
                async with (
                    websockets.connect(url, open_timeout=PATIENCE_S) as web,
                    http.stream("POST", "/v1/completions", json=_ENDLESS) as stream,
                    reading(http, 6, ignore_eos=True) as responses,
                ):
                    await web.send('{"type": "response.create", "input": "x", "ignore_eos": true}')
                    lines = stream.aiter_lines()
                    await anext(lines)
                    await until(lambda: len(engine.submitted) == 9)
                    engine.may_speak.clear()  # none can end by itself
                    process.send_signal(signal.SIGTERM)
                    error, done = [line async for line in lines if line][-2:]
                    assert json.loads(error[6:])["error"]["message"] == (
                        "the server is shutting down"
                    )
                    assert done == "data: [DONE]"
                    *_, last = [json.loads(message)["type"] async for message in ending(web)]
                    assert last == "response.failed"
                    for each in responses:
                        assert await last_event(each) == "response.failed"
                    status = await asyncio.to_thread(process.wait, PATIENCE_S)
                    assert status in (0, -signal.SIGTERM)
                await until(lambda: engine.aborted == set(list(engine.submitted)[-8:]))


Reader = asyncio.Task[str]


@contextlib.asynccontextmanager
async def reading(http: httpx.AsyncClient, num: int, **body: object) -> AsyncIterator[list[Reader]]:
    """Readers of so many responses, of which half are read where they are created, and half, by
    sse-starlette, from their logs. All have begun."""
    body = {"input": "x", **body}
    begun: set[str] = set()

    async def read(method: str, path: str, **options: Any) -> str:
        text = ""
        async with http.stream(method, path, **options) as response:
            async for piece in response.aiter_text():
                text += piece
                begun.update(re.findall(r"resp_\w+", text)[:1])
        return text

    async with asyncio.TaskGroup() as group:
        readers = []
        for _ in range(num // 2):
            created = await http.post("/v1/responses", json={**body, "background": True})
            path = f"/v1/responses/{created.json()['id']}?stream=true"
            readers.append(group.create_task(read("GET", path)))
            stream = {**body, "stream": True}
            readers.append(group.create_task(read("POST", "/v1/responses", json=stream)))
        await until(lambda: len(begun) == num)
        yield readers


async def last_event(reader: Reader) -> str:
    *_, event, end = (await reader).split("\n\n")
    assert end == ""
    return event.partition("\n")[0].removeprefix("event: ")


async def test_while_streams_end_nothing_new_is_taken_and_a_second_signal_cuts_them(
    model_path: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    address = f"{tmp_path}/engine.sock"
    # The head of a stream comes with its first event, or comment.
    settings: dict[str, Any] = {"shutdown_grace_s": 600, "ping_interval_s": 0.2}
    with launched(str(model_path), address, **settings) as (process, port, status_fd):
        async with (
            FakeEngine(address, tokenizer.encode(ANSWER)) as engine,
            client_of(port) as http,
        ):
            await asyncio.to_thread(os.read, status_fd, 1000)
            engine.may_speak.clear()
            # One that is used all the while stays open.
            reader, writer = await asyncio.open_connection("127.0.0.1", port)

            async def status(request: bytes) -> bytes:
                writer.write(request + b"\r\nHost: localhost\r\n\r\n")
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(head.lower().partition(b"content-length: ")[2].split()[0])
                await reader.readexactly(size)
                return head.split()[1]

            async with (
                http.stream("POST", "/v1/completions", json=_ENDLESS) as stream,
                reading(http, 20) as responses,
            ):
                assert await status(b"GET /ready HTTP/1.1") == b"200"
                await until(lambda: len(engine.submitted) == 21)
                process.send_signal(signal.SIGTERM)
                async with asyncio.timeout(PATIENCE_S):
                    while await status(b"GET /ready HTTP/1.1") == b"200":  # noqa: ASYNC110
                        await asyncio.sleep(0.02)
                body = b"Content-Length: 15\r\n\r\n" + b'{"prompt": "x"}'
                writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n" + body)
                assert b" 503 " in await reader.readuntil(b"\r\n")
                assert len(engine.submitted) == 21
                await asyncio.sleep(0.8)  # sse-starlette would look twice, and end its own
                assert not any(each.done() for each in responses)
                engine.step_s = 0.01
                engine.may_speak.set()
                for each in responses:
                    assert await last_event(each) == "response.completed"
                assert process.poll() is None
                process.send_signal(signal.SIGTERM)
                assert await asyncio.to_thread(process.wait, PATIENCE_S) == -signal.SIGTERM
                lines: list[str] = []
                with contextlib.suppress(httpx.RemoteProtocolError):
                    async for line in stream.aiter_lines():
                        lines.append(line)  # noqa: PERF401  (it ends in an error)
                assert lines
                assert not any("DONE" in line for line in lines)
            writer.close()


async def test_what_does_not_end_in_time_is_handed_over_before_it_fails(
    model_path: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.gateway.launch.process._HELLO_S", PATIENCE_S)
    address = f"{tmp_path}/engine.sock"
    config = GatewayConfig(engine_address=address, model=ModelConfig(model=str(model_path)))
    app = create_app(config)
    server = _Server(_uvicorn_config(config, app), app, log=LogWriter(str), grace_s=0.1)
    events: list[str] = []

    class Store:
        async def hand_over(self) -> None:
            events.append("handed over")

        async def let_readers_end(self, limit_s: float) -> None:
            events.append(f"let readers end within {limit_s} s")

    async with FakeEngine(address, tokenizer.encode(ANSWER), step_s=0.05) as engine:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            task = asyncio.create_task(server._serve([listener]))
            async with client_of(listener.getsockname()[1]) as http:
                assert (await http.get("/ready")).status_code == 200, "it waited for the engine"
                app.state.log_store = Store()
                async with http.stream("POST", "/v1/completions", json=_ENDLESS) as stream:
                    async for line in stream.aiter_lines():
                        engine.may_speak.clear()
                        server.should_exit = True
                        events += [line] if line else []
            await task
    assert "let readers end within 0.1 s" in events
    *_, handed_over, error, done = [each for each in events if "let readers" not in each]
    assert handed_over == "handed over"
    assert "the server is shutting down" in error
    assert done == "data: [DONE]"


async def test_a_worker_that_ends_leaves_idle_connections_to_its_siblings(
    model_path: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their clients connect again, instead of getting 503 as long as it has streams."""
    monkeypatch.setattr("penstock.gateway.launch.process._HELLO_S", PATIENCE_S)
    address = f"{tmp_path}/engine.sock"
    config = GatewayConfig(engine_address=address, model=ModelConfig(model=str(model_path)))
    app = create_app(config)
    server = _Server(
        _uvicorn_config(config, app),
        app,
        log=LogWriter(str),
        grace_s=PATIENCE_S,
        has_siblings=True,
    )
    async with FakeEngine(address, tokenizer.encode(ANSWER), step_s=0.05) as engine:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            task = asyncio.create_task(server._serve([listener]))
            port = listener.getsockname()[1]
            async with client_of(port) as http:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"GET /ready HTTP/1.1\r\nHost: localhost\r\n\r\n")
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200 ")
                async with http.stream("POST", "/v1/completions", json=_ENDLESS) as stream:
                    lines = stream.aiter_lines()
                    await anext(lines)
                    server.should_exit = True
                    async with asyncio.timeout(PATIENCE_S):
                        rest = await reader.read()
                    assert rest == b'{"status":"ready"}', "and it was closed"
                    assert not task.done()
                    writer.close()
                    await writer.wait_closed()
                    assert await anext(lines) is not None, "its stream goes on"
                    server.force_exit = True
                    app.state.engine._streams.fail_all("the test is over")
                    async for _ in lines:
                        pass
            await task
        assert engine.submitted
