"""The installed command, run as a user runs it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import httpx
import pytest

from ..support.synthetic.server import SyntheticServer, serve
from ..support.synthetic.settings import SyntheticSettings

Penstock = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def penstock() -> Penstock:
    """`penstock ARGUMENTS…` as a process of its own."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(Path(sys.executable).with_name("penstock")), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)

    return run


@pytest.fixture(scope="module")
def server() -> Iterator[SyntheticServer]:
    """A synthetic server for the tests of a module."""
    with serve(SyntheticSettings(max_model_len=10_000, max_body_bytes=10_000)) as server:
        yield server


@pytest.fixture
async def http(server: SyntheticServer) -> AsyncIterator[httpx.AsyncClient]:
    """A client of it."""
    async with httpx.AsyncClient(base_url=server.base_url, timeout=60) as client:
        yield client
