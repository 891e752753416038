"""A rival that is an OpenAI-compatible server in processes of its own."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import psutil
import uvloop

from penstock.load.client.bodies import Endpoint
from penstock.load.client.records import Call, StreamRecord
from penstock.load.client.sse import SseTransport
from penstock.load.client.transport import Transport
from penstock.load.peers.rival import RivalError
from penstock.load.peers.workloads import Workload
from penstock.load.processes import end
from penstock.load.workloads.arrivals import ClosedLoop
from penstock.load.workloads.driver import RunResult, run

_READY_WITHIN_S = 240.0
_STOP_WITHIN_S = 20.0
_CELL_WITHIN_S = 300.0
_TAIL_BYTES = 600


class FreshConnections:
    """A `Transport` with a connection for each call, for a server that closes after a stream.

    llama.cpp does, while it promises to keep the connection.
    """

    def __init__(self, base_url: str, endpoint: Endpoint) -> None:
        self._base_url, self._endpoint = base_url, endpoint

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def stream(self, call: Call, record: StreamRecord) -> None:
        async with SseTransport(self._base_url, self._endpoint) as transport:
            await transport.stream(call, record)


def measure_http(
    base_url: str,
    model: str,
    workload: Workload,
    *,
    transport: Callable[[str, Endpoint], Transport] = SseTransport,
) -> RunResult:
    """One run of a workload against a server, this process at real-time priority if it may.

    Raises:
        RivalError: it took too long.
    """

    async def go() -> RunResult:
        async with (
            asyncio.timeout(_CELL_WITHIN_S),
            transport(base_url, workload.endpoint) as opened,
        ):
            return await run(
                opened,
                workload.dialogues,
                arrivals=ClosedLoop(workload.concurrency),
                model=model,
                extra={"temperature": 0},
            )

    try:
        with real_time():
            return uvloop.run(go())
    except TimeoutError:
        raise RivalError(f"{workload.name} took longer than {_CELL_WITHIN_S:g} s") from None


@contextmanager
def real_time() -> Iterator[bool]:
    """SCHED_RR meanwhile, and whether that was permitted.

    On few cores a server that spins would keep the client waiting, and look slow for it.
    """
    try:
        # Reset on fork: what is started meanwhile must not be in the way of everything else.
        policy = os.SCHED_RR | os.SCHED_RESET_ON_FORK
        os.sched_setscheduler(0, policy, os.sched_param(1))
    except (PermissionError, AttributeError):
        yield False
        return
    try:
        yield True
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


class HttpServer:
    """A `Running`: started by a command, ready when `/health` says so."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        port: int,
        model: str,
        env: Mapping[str, str],
        log: Path,
        transport: Callable[[str, Endpoint], Transport] = SseTransport,
    ) -> None:
        self._transport = transport
        self._base_url = f"http://127.0.0.1:{port}"
        self._model = model
        began_s = time.perf_counter()
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as file:
            self._popen = subprocess.Popen(  # noqa: S603  (a command of ours)
                command,
                env={**os.environ, **env},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        self.process = psutil.Process(self._popen.pid)
        try:
            self._await_ready(began_s, log)
        except BaseException:
            self.stop()
            raise
        self.ready_s = time.perf_counter() - began_s

    def measure(self, workload: Workload) -> RunResult:
        if self._popen.poll() is not None:
            raise RivalError(f"it had ended with {self._popen.returncode}")
        return measure_http(self._base_url, self._model, workload, transport=self._transport)

    def stop(self) -> None:
        end(self.process, within_s=_STOP_WITHIN_S)
        self._popen.wait()

    def _await_ready(self, began_s: float, log: Path) -> None:
        while time.perf_counter() - began_s < _READY_WITHIN_S:
            if self._popen.poll() is not None:
                raise RivalError(f"it ended with {self._popen.returncode}: {tail(log)}")
            try:
                with urllib.request.urlopen(self._base_url + "/health", timeout=5) as answer:  # noqa: S310
                    if answer.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                time.sleep(0.05)
        raise RivalError(f"it was not ready within {_READY_WITHIN_S:g} s: {tail(log)}")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def tail(log: Path) -> str:
    """The end of a log, on one line."""
    text = log.read_bytes()[-_TAIL_BYTES:].decode("utf-8", "replace")
    return " / ".join(line.strip() for line in text.splitlines() if line.strip())
