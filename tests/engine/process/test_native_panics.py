"""What a process keeps about panics over forks."""

from __future__ import annotations

import subprocess
import sys

_FORKS = """
import os

calls = []
register = os.register_at_fork
os.register_at_fork = lambda **call: (calls.append(call), register(**call))

from penstock.engine.process.native_panics import PANICS_HIDDEN

num = len(calls)
for _ in range(4):
    if pid := os.fork():
        os.waitpid(pid, 0)
        os._exit(0)
with PANICS_HIDDEN:
    print(num, len(calls))
"""


def test_a_fork_of_a_fork_registers_nothing_more() -> None:
    """An engine comes out of a template that came out of an engine, and so on."""
    done = subprocess.run(
        [sys.executable, "-c", _FORKS], check=True, capture_output=True, text=True
    )
    num_before, num_after = map(int, done.stdout.split())
    assert num_after == num_before > 0
