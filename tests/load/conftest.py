"""The commands within this process, and servers that all tests share."""

from __future__ import annotations

import contextlib
import gc
import io
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from typing import NamedTuple

import httpx
import pytest
import torch

from penstock.gateway.launch.cli import main
from penstock.load import launch
from penstock.load.launch import Started

from ..support.synthetic.server import SyntheticServer, serve
from ..support.synthetic.settings import SyntheticSettings


class Done(NamedTuple):
    """How a command ended, and what it printed."""

    returncode: int
    stdout: str
    stderr: str


Penstock = Callable[..., Done]


def run_command(command: Callable[[], int]) -> Done:
    """Run what a command line runs; what it changes of this process is changed back."""
    stdout, stderr = io.StringIO(), io.StringIO()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    num_threads = torch.get_num_threads()
    try:
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            code = command()
    except SystemExit as end:  # as argparse ends one
        code = int(end.code or 0)
    finally:
        torch.set_num_threads(num_threads)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return Done(code, stdout.getvalue(), stderr.getvalue())


@pytest.fixture(autouse=True)
def _garbage_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a bench measures, it collects garbage: here among a million objects of other tests."""
    monkeypatch.setattr(gc, "collect", lambda: 0)


@pytest.fixture(scope="session")
def penstock() -> Penstock:
    """`penstock ARGUMENTS…`, in this process."""

    def run(*arguments: str) -> Done:
        return run_command(lambda: main(arguments))

    return run


@pytest.fixture(scope="session")
def demo() -> Iterator[Started]:
    """Our own server with the demo model, for tests that leave it as it was."""
    with launch.server() as started:
        yield started


@pytest.fixture(scope="session")
def server() -> Iterator[SyntheticServer]:
    """A synthetic server for tests that leave it as it was."""
    with serve(SyntheticSettings(max_model_len=10_000, max_body_bytes=10_000)) as server:
        yield server


@pytest.fixture
async def http(server: SyntheticServer) -> AsyncIterator[httpx.AsyncClient]:
    """A client of it."""
    async with httpx.AsyncClient(base_url=server.base_url, timeout=60) as client:
        yield client
