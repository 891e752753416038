"""Starting the real thing: `penstock serve` as a user would, in processes of its own."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from penstock.engine.model_files.resolve import DEMO_MODEL_PATH

PENSTOCK = str(Path(sys.executable).with_name("penstock"))
READY_S = 180.0
END_S = 120.0  # for a process to end, or for anything else that is sure to come
NUM_CONTEXT_TOKENS = 32_768  # of a model by `lengthen`
ENDLESS_TOKENS = 30_000  # more than any test waits for; what stops them is never their number


@dataclass
class Served:
    """A running server."""

    process: subprocess.Popen[str]
    base_url: str
    line: str
    log: Path
    family: list[psutil.Process] = field(default_factory=list)

    def child(self, name: str) -> psutil.Process:
        """The process of this title that it has now."""
        return children(self.process, name)[0]

    def is_ready(self) -> bool:
        """It would serve a request now."""
        try:
            return httpx.get(f"{self.base_url}/ready", timeout=END_S).status_code == 200
        except httpx.TransportError:  # its only gateway was killed
            return False

    def renew_family(self) -> list[psutil.Process]:
        """The processes it has now; with a killed one gone, its successor among them."""
        self.family = psutil.Process(self.process.pid).children(recursive=True)
        return self.family

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=END_S)


def children(server: subprocess.Popen[str], name: str) -> list[psutil.Process]:
    """Its processes of this title that live now. Some end, or get another title, meanwhile."""
    found = []
    for child in psutil.Process(server.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if child.name() == name and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
    return found


def lengthen(folder: Path) -> tuple[str, ...]:
    """The built-in model with a context of `NUM_CONTEXT_TOKENS`, as arguments of `serve`: an answer
    can be so long that it does not end of itself while a test looks on, however slow that is."""
    path = folder / "demo"
    path.mkdir()
    for file in DEMO_MODEL_PATH.iterdir():
        (path / file.name).symlink_to(file)
    config = json.loads((DEMO_MODEL_PATH / "config.json").read_text())
    (path / "config.json").unlink()
    config["max_position_embeddings"] = NUM_CONTEXT_TOKENS
    (path / "config.json").write_text(json.dumps(config))
    return str(path), "--served-model-name", "demo"


def free_port() -> int:
    """One that nobody takes by chance before it is used: not of those that connections get."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port


def launch(
    arguments: Sequence[str], log: Path, *, command: Sequence[str] = (PENSTOCK,)
) -> subprocess.Popen[str]:
    """`penstock serve` on a free port; its log goes to a file, and chats to none of the user's
    folders. Streams that a test left behind do not hold up its end for long."""
    with log.open("w") as stderr:
        return subprocess.Popen(
            [*command, "serve", "--port", "0", *arguments],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={"PENSTOCK_SHUTDOWN_GRACE_S": "2", "PENSTOCK_DATA_DIR": "none", **os.environ},
        )


def read_line(process: subprocess.Popen[str], *, timeout_s: float = READY_S) -> str:
    """Its next line; empty when it ends without one."""
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], timeout_s)
    assert readable, "no word from the server"
    return process.stdout.readline()


@contextmanager
def serve(*arguments: str, log: Path, command: Sequence[str] = (PENSTOCK,)) -> Iterator[Served]:
    """A server that is ready, stopped at the end if it still runs."""
    process = launch(arguments, log, command=command)
    try:
        line = read_line(process)
        match = re.search(r"https?://\S+", line)
        assert match, f"not ready: {line!r} {log.read_text()}"
        family = psutil.Process(process.pid).children(recursive=True)
        yield Served(process, match.group(), line, log, family)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=END_S)
        if process.stdout is not None:
            process.stdout.close()


@contextmanager
def suspended(process: psutil.Process) -> Iterator[None]:
    """It stands still: what it would do at once is not done before this ends."""
    process.suspend()
    try:
        yield
    finally:
        process.resume()


def wait_gone(processes: Collection[psutil.Process]) -> None:
    """Assert that none of them is left, zombies aside."""
    wait_until(lambda: not any(map(_lives, processes)))


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], bool], *, timeout_s: float = END_S) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it never came true"
        time.sleep(0.02)


async def metrics(client: httpx.AsyncClient, *names: str) -> list[float]:
    """The values of each `penstock:name`, at one moment."""
    lines = (await client.get("/metrics")).text.splitlines()
    found = (
        next(line for line in lines if line.startswith(f"penstock:{name}{{")) for name in names
    )
    return [float(line.rpartition(" ")[2]) for line in found]


async def metric(client: httpx.AsyncClient, name: str) -> float:
    """The value of `penstock:name`."""
    (value,) = await metrics(client, name)
    return value


async def idle(client: httpx.AsyncClient) -> None:
    """Wait until nothing runs and no block is taken, as the engine has last reported."""
    async with asyncio.timeout(END_S):
        while any(await metrics(client, "num_requests_running", "kv_cache_usage_perc")):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
