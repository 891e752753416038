"""How a server starts, fails to start, is killed in every way, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest
from safetensors.torch import load_file, save_file

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


def test_three_processes_with_titles(demo_server: Served) -> None:
    names = sorted(child.name() for child in demo_server.family)
    assert names == ["penstock-engine", "penstock-gateway"]
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_clear_line_and_a_signal_ends_every_process(number: int, tmp_path: Path) -> None:
    with serve(log=tmp_path / "log") as served:
        assert served.line.startswith("penstock is ready at http://127.0.0.1:")
        assert "model demo" in served.line
        assert served.stop(number) == 0
        wait_gone(served.family)
        assert "Traceback" not in served.log.read_text()


def test_a_signal_during_start_ends_every_process(tmp_path: Path) -> None:
    process = launch([], tmp_path / "log")
    parent = psutil.Process(process.pid)
    wait_until(lambda: len(parent.children()) == 2)
    family = parent.children()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=END_S) == 0
    wait_gone(family)
    process.communicate()


def test_kill_9_of_the_supervisor_leaves_no_process(tmp_path: Path) -> None:
    with serve(log=tmp_path / "log") as served:
        served.process.kill()
        served.process.wait()
        wait_gone(served.family)


async def test_a_stop_in_the_middle_of_a_stream_leaves_no_process(
    long_model: tuple[str, ...], tmp_path: Path
) -> None:
    with serve(*long_model, "--shutdown-grace-s", "0.2", log=tmp_path / "log") as served:
        async with (
            httpx.AsyncClient(base_url=served.base_url, timeout=60) as client,
            client.stream("POST", "/v1/chat/completions", json=_STORY) as response,
        ):
            lines = response.aiter_lines()
            await anext(lines)
            served.process.send_signal(signal.SIGTERM)
            *_, error, last = [line async for line in lines if line]
        assert "the server is shutting down" in error
        assert last == "data: [DONE]", "even then a stream has its terminal event"
        assert await asyncio.to_thread(served.process.wait, END_S) == 0
        wait_gone(served.family)


def test_an_engine_that_dies_before_the_gateway_is_ready_ends_the_command(tmp_path: Path) -> None:
    process = launch([], tmp_path / "log")
    parent = psutil.Process(process.pid)
    wait_until(lambda: len(parent.children()) == 2)
    family = parent.children()
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


def fail(*arguments: str) -> str:
    """The one line of a start that fails; asserts the exit code and that it is one line."""
    result = subprocess.run(
        [PENSTOCK, "serve", "--port", "0", *arguments],
        capture_output=True,
        text=True,
        timeout=READY_S,
    )
    assert result.returncode != 0
    assert result.stdout == ""
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("penstock: error: ")
    return lines[0]


def test_a_bad_model_path_is_said() -> None:
    assert "'/no/such/model' is not a directory" in fail("/no/such/model")


def test_an_unsupported_architecture_is_said(tiny_model: Callable[..., Path]) -> None:
    path = tiny_model() / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["Mamba"]}))
    line = fail(str(path.parent))
    assert "Mamba is not supported" in line
    assert "LlamaForCausalLM" in line, "it says what would work"


def test_corrupt_weights_are_said(tiny_model: Callable[..., Path]) -> None:
    path = tiny_model()
    whole = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    assert "model.safetensors" in fail(str(path))
    (path / "model.safetensors").write_bytes(b"no weights at all")
    assert "model.safetensors" in fail(str(path))


def test_a_missing_tensor_is_named(tiny_model: Callable[..., Path]) -> None:
    path = tiny_model()
    tensors = load_file(path / "model.safetensors")
    name = next(name for name in tensors if "layers.1.mlp" in name)
    del tensors[name]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    assert name in fail(str(path))


def test_a_context_that_cannot_fit_is_said_with_the_numbers() -> None:
    line = fail("--kv-cache-memory-bytes", "1M")
    assert "2048 tokens" in line
    assert "--max-model-len" in line


@pytest.mark.parametrize(
    "flags", [("--kv-cache-memory-bytes", "100T"), ("--num-blocks", "9999999")]
)
def test_a_cache_beyond_the_machine_is_said_with_the_numbers(flags: tuple[str, ...]) -> None:
    assert "bytes free" in fail(*flags)


def test_a_model_with_senseless_defaults_is_said(tiny_model: Callable[..., Path]) -> None:
    path = tiny_model()
    (path / "generation_config.json").write_text('{"top_p": 0}')
    assert "top_p must be in (0, 1]" in fail(str(path))


def test_a_port_in_use_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"cannot listen on 127.0.0.1:{port}" in fail("--port", port)


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (("--gpu-memory-utilization", "1.5"), "--gpu-memory-utilization"),
        (
            ("--no-enable-chunked-prefill", "--max-num-batched-tokens", "8"),
            "max-num-batched-tokens",
        ),
        (("--max-model-len", "99999999"), "max-model-len"),
        (("--config", "/no/such/file"), "config file"),
    ],
)
def test_settings_that_cannot_work_are_said(arguments: tuple[str, ...], fault: str) -> None:
    assert fault in fail(*arguments)
