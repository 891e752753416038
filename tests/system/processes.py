"""Starting the real thing: `penstock serve` as a user would, in processes of its own."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

PENSTOCK = str(Path(sys.executable).with_name("penstock"))
READY_S = 60.0


@dataclass
class Served:
    """A running server."""

    process: subprocess.Popen[str]
    base_url: str
    line: str
    log: Path
    family: list[psutil.Process] = field(default_factory=list)

    def child(self, name: str) -> psutil.Process:
        """Its process of this title."""
        return next(child for child in self.family if child.name() == name)

    def renew_family(self) -> list[psutil.Process]:
        """The processes it has now; with a killed one gone, its successor among them."""
        self.family = psutil.Process(self.process.pid).children(recursive=True)
        return self.family

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=20)


def launch(arguments: Sequence[str], log: Path) -> subprocess.Popen[str]:
    """`penstock serve` on a free port; its log goes to a file. Streams that a test left behind do
    not hold up its end for long."""
    with log.open("w") as stderr:
        return subprocess.Popen(
            [PENSTOCK, "serve", "--port", "0", *arguments],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={"PENSTOCK_SHUTDOWN_GRACE_S": "2", **os.environ},
        )


def read_line(process: subprocess.Popen[str], *, timeout_s: float = READY_S) -> str:
    """Its next line; empty when it ends without one."""
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], timeout_s)
    assert readable, "no word from the server"
    return process.stdout.readline()


@contextmanager
def serve(*arguments: str, log: Path) -> Iterator[Served]:
    """A server that is ready, stopped at the end if it still runs."""
    process = launch(arguments, log)
    try:
        line = read_line(process)
        match = re.search(r"https?://\S+", line)
        assert match, f"not ready: {line!r} {log.read_text()}"
        family = psutil.Process(process.pid).children(recursive=True)
        yield Served(process, match.group(), line, log, family)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=20)
        if process.stdout is not None:
            process.stdout.close()


def wait_gone(processes: Sequence[psutil.Process], *, timeout_s: float = 10.0) -> None:
    """Assert that none of them is left, zombies aside."""
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    assert [child for child in alive if child.status() != psutil.STATUS_ZOMBIE] == []


def wait_until(condition, *, timeout_s: float = 10.0) -> None:  # type: ignore[no-untyped-def]
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
