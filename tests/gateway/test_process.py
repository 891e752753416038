"""The gateway as a process: settings by pipe, an inherited socket, one status line, no torch."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
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
import websockets

from penstock.engine.config import ModelConfig
from penstock.engine.text import Tokenizer

from .conftest import ANSWER, until
from .fake_engine import FakeEngine


def test_no_torch_in_the_gateway() -> None:
    code = (
        "import sys, penstock.gateway.app, penstock.gateway.process;"
        "assert 'torch' not in sys.modules;"
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@contextlib.contextmanager
def launched(model: str, address: str) -> Iterator[tuple[subprocess.Popen[bytes], int, int]]:
    """The process, its port, and the status pipe's reading end."""
    config_read, config_write = os.pipe()
    status_read, status_write = os.pipe()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        settings: dict[str, Any] = {
            "host": "127.0.0.1",
            "port": 0,
            "engine_address": address,
            "api_key": [],
            "model": asdict(ModelConfig(model=model)),
            "log_level": "info",
            "shutdown_grace_s": 1,
            "num_blocks": None,
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock.gateway.process"],
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


async def ending(web: websockets.ClientConnection) -> AsyncIterator[str | bytes]:
    """Messages until the server closes."""
    with contextlib.suppress(websockets.ConnectionClosed):
        while True:
            yield await web.recv()


async def test_serves_and_stops(model_path: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/engine.sock"
    with launched(str(model_path), address) as (process, port, status_fd):
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=10) as http:
            assert (await http.get("/ready")).status_code == 503  # no engine yet
            assert (await http.get("/health")).status_code == 200
            async with FakeEngine(address, tokenizer.encode(ANSWER), step_s=0.01) as engine:
                line = await asyncio.to_thread(os.read, status_fd, 1000)
                assert json.loads(line) == {"event": "ready"}
                assert (await http.get("/ready")).status_code == 200
                response = await http.post("/v1/completions", json={"prompt": "x"})
                assert response.json()["choices"][0]["text"] == ANSWER
                assert "server" not in response.headers
                assert psutil.Process(process.pid).cmdline()[0] == "penstock-gateway"
                assert engine.aborted == set()
                body = {"prompt": "x", "ignore_eos": True, "stream": True, "max_tokens": 200}
                async with (
                    websockets.connect(f"ws://127.0.0.1:{port}/v1/responses") as web,
                    http.stream("POST", "/v1/completions", json=body) as stream,
                ):
                    await web.send('{"type": "response.create", "input": "x", "ignore_eos": true}')
                    lines = stream.aiter_lines()
                    await anext(lines)
                    process.send_signal(signal.SIGTERM)
                    error, done = [line async for line in lines if line][-2:]
                    assert json.loads(error[6:])["error"]["message"] == (
                        "the server is shutting down"
                    )
                    assert done == "data: [DONE]"
                    *_, last = [json.loads(message)["type"] async for message in ending(web)]
                    assert last == "response.failed"
                    assert await asyncio.to_thread(process.wait, 10) in (0, -signal.SIGTERM)
                await until(lambda: engine.aborted == set(list(engine.submitted)[-2:]))


async def test_a_bad_model_is_one_status_line(tmp_path: Path) -> None:
    with launched(str(tmp_path), f"ipc://{tmp_path}/engine.sock") as (process, _, status_fd):
        line = await asyncio.to_thread(os.read, status_fd, 1000)
        event = json.loads(line)
        assert event["event"] == "failed"
        assert "config.json is missing" in event["message"]
        assert await asyncio.to_thread(process.wait, 10) == 1
