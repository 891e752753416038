"""Whole servers, started by command lines written for vLLM, on a CPU."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from pathlib import Path

import httpx
import pytest
import websockets

from .processes import END_S, PENSTOCK, launch, read_line, serve

HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
_WITHOUT_EFFECT = "accepted without effect: "


def told(log: Path) -> list[str]:
    return [line for line in log.read_text().splitlines() if _WITHOUT_EFFECT in line]


@pytest.mark.exhaustive
def test_what_has_no_meaning_here_is_said_in_one_line(tmp_path: Path) -> None:
    line = (
        "--model demo --dtype half --max_model_len 1k --served-model-name one * --seed 7 "
        "--disable-log-requests --disable-log-stats --enforce-eager --trust-remote-code "
        "--gpu-memory-utilization 0.5 --max-logprobs 50 -tp 1 --api-server-count 1"
    )
    with serve(*line.split(), log=tmp_path / "log") as served:
        assert "context 1000" in served.line
        answer = httpx.post(
            f"{served.base_url}/v1/chat/completions", json={"model": "gpt", **HELLO}, timeout=END_S
        )
        assert answer.json()["model"] == "gpt"
    [said] = told(tmp_path / "log")
    for name in (
        "--disable-log-requests", "--disable-log-stats", "--enforce-eager", "--trust-remote-code",
        "--gpu-memory-utilization", "--max-logprobs",
    ):  # fmt: skip
        assert name in said
    assert "--dtype" not in said


@pytest.mark.exhaustive
def test_where_all_has_a_meaning_nothing_is_said(tmp_path: Path) -> None:
    with serve("demo", "--max-model-len", "auto", log=tmp_path / "log") as served:
        assert served.stop() == 0
    assert told(tmp_path / "log") == []


@pytest.mark.exhaustive
async def test_a_unix_socket(tmp_path: Path) -> None:
    path, log = tmp_path / "penstock.sock", tmp_path / "log"
    with socket.socket(socket.AF_UNIX) as stale:  # of a server that was killed
        stale.bind(str(path))
    process = launch(["demo", "--uds", str(path)], log)
    try:
        assert read_line(process).startswith(f"penstock is ready at unix:{path}  (model demo, ")
        transport = httpx.AsyncHTTPTransport(uds=str(path))
        async with httpx.AsyncClient(transport=transport, base_url="http://any.name") as http:
            assert (await http.get("/health")).status_code == 200
            answer = await http.post("/v1/chat/completions", json=HELLO, timeout=END_S)
            assert answer.status_code == 200, "whatever a proxy passes on as Host"
        async with websockets.unix_connect(str(path), uri="ws://any.name/v1/responses"):
            pass
        another = await asyncio.to_thread(
            subprocess.run,
            [PENSTOCK, "serve", "demo", "--uds", str(path)],
            check=False, capture_output=True, text=True, timeout=END_S,
        )  # fmt: skip
        assert another.returncode == 2
        assert f"--uds: cannot listen on {path}: another server listens there" in another.stderr
        assert path.is_socket()
    finally:
        process.terminate()
        assert process.wait(timeout=END_S) == 0
        assert process.stdout is not None
        process.stdout.close()
    assert not path.exists()
    assert "Traceback" not in log.read_text()


@pytest.mark.parametrize("wrong", ["missing/penstock.sock", "x" * 200])
def test_a_path_that_cannot_be_listened_on(wrong: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [PENSTOCK, "serve", "--uds", str(tmp_path / wrong)],
        check=False, capture_output=True, text=True, timeout=END_S,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("penstock: error: --uds: cannot listen on ")
    assert done.stderr.count("\n") == 1
