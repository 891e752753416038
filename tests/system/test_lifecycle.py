"""How a server starts, fails to start, is told to end, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest

from .processes import (
    END_S,
    ENDLESS_TOKENS,
    PENSTOCK,
    READY_S,
    Served,
    launch,
    serve,
    wait_gone,
    wait_until,
)

_STORY = {
    "model": "demo",
    "messages": [{"role": "user", "content": "Tell me a long story."}],
    "stream": True,
    "max_tokens": ENDLESS_TOKENS,
    "ignore_eos": True,
}


def test_processes_with_titles(demo_server: Served) -> None:
    names = sorted(child.name() for child in demo_server.family)
    assert names == ["penstock-engine", "penstock-gateway", "penstock-template"]
    assert psutil.Process(demo_server.process.pid).name() == "penstock"


def test_no_torch_in_the_gateway_and_no_framework_in_the_supervisor(demo_server: Served) -> None:
    def mapped(pid: int) -> str:
        return Path(f"/proc/{pid}/maps").read_text()

    assert "libtorch" in mapped(demo_server.child("penstock-engine").pid)
    assert "libtorch" not in mapped(demo_server.child("penstock-gateway").pid)
    supervisor = mapped(demo_server.process.pid)
    assert "libtorch" not in supervisor
    assert "pydantic" not in supervisor
    assert "msgpack" not in supervisor


async def test_one_clear_line_and_ctrl_c_in_the_middle_of_a_stream_ends_every_process(
    long_model: tuple[str, ...], tmp_path: Path
) -> None:
    with serve(*long_model, "--shutdown-grace-s", "0.2", log=tmp_path / "log") as served:
        assert served.line.startswith("penstock is ready at http://127.0.0.1:")
        assert f"(model {long_model[0]}, " in served.line
        async with (
            httpx.AsyncClient(base_url=served.base_url, timeout=END_S) as client,
            client.stream("POST", "/v1/chat/completions", json=_STORY) as response,
        ):
            lines = response.aiter_lines()
            await anext(lines)
            served.process.send_signal(signal.SIGINT)
            *_, error, last = [line async for line in lines if line]
        assert "the server is shutting down" in error
        assert last == "data: [DONE]", "even then a stream has its terminal event"
        assert await asyncio.to_thread(served.process.wait, END_S) == 0
        wait_gone(served.family)
        assert "Traceback" not in served.log.read_text()


def test_a_signal_during_start_ends_every_process(tmp_path: Path) -> None:
    process, family = _starting(tmp_path)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=END_S) == 0
    wait_gone(family)
    process.communicate()


@pytest.mark.process_kills
def test_two_signals_during_start_end_it_at_once(tmp_path: Path) -> None:
    process, family = _starting(tmp_path)
    family[0].suspend()  # it would not hear SIGTERM
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: "stopping" in (tmp_path / "log").read_text())
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=END_S) == 1
    wait_gone(family)
    process.communicate()


def _starting(tmp_path: Path) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """A server that is not ready yet, and its engine and gateway."""
    process = launch([], tmp_path / "log")
    parent = psutil.Process(process.pid)
    wait_until(lambda: len(parent.children()) == 2)
    return process, parent.children()


@pytest.mark.process_kills
@pytest.mark.exhaustive
def test_an_engine_that_dies_before_the_gateway_is_ready_ends_the_command(tmp_path: Path) -> None:
    process, family = _starting(tmp_path)
    engine, gateway = sorted(family, key=lambda child: child.pid)
    gateway.suspend()  # it will not be ready
    try:
        # It closes a pipe to the supervisor when it has said that it is ready; its signs of life
        # have another.
        wait_until(lambda: _num_pipes(engine) == 1, timeout_s=READY_S)
        engine.kill()
        wait_until(lambda: "the engine died (SIGKILL)" in (tmp_path / "log").read_text())
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):  # the supervisor may have killed it
            gateway.resume()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=END_S)
    assert process.returncode == 1
    wait_gone(family)


def _num_pipes(process: psutil.Process) -> int:
    """Pipes it holds beside its standard streams."""
    pipes: dict[str, int] = {}  # → its lowest descriptor
    for link in Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            file, number = str(link.readlink()), int(link.name)
            if file.startswith("pipe:"):
                pipes[file] = min(pipes.get(file, number), number)
    return sum(number > 2 for number in pipes.values())


def test_a_start_that_fails_says_why_in_one_line(tiny_model: Callable[..., Path]) -> None:
    """In the words of the child that found it: `tests/engine/test_failed_starts.py` has more."""
    path = tiny_model()
    whole = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    command = [PENSTOCK, "serve", "--port", "0", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=READY_S)
    assert result.returncode == 1
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("penstock: error: ")
    assert "model.safetensors" in line
