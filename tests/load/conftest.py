"""The installed command, run as a user runs it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Penstock = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def penstock() -> Penstock:
    """`penstock ARGUMENTS…` as a process of its own."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(Path(sys.executable).with_name("penstock")), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)

    return run
