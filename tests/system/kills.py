"""kill -9 of a server's processes, and their successors."""

from __future__ import annotations

import asyncio
import re
import signal

import psutil

from .processes import Served, wait_until


async def kill(served: Served, which: str, by: signal.Signals = signal.SIGKILL) -> None:
    """Kill the engine or the gateway, and wait for its successor."""
    num_back = len(starts_s(served, which)) + 1
    named(served, which).send_signal(by)
    await asyncio.to_thread(wait_until, lambda: len(starts_s(served, which)) == num_back)


def named(served: Served, which: str) -> psutil.Process:
    """The engine or the gateway that it has now."""
    return served.child(f"penstock-{which}")


def starts_s(served: Served, which: str) -> list[float]:
    """How long each took that came back."""
    found = re.findall(rf"the {which} is back after ([0-9.]+) s", served.log.read_text())
    return [float(start_s) for start_s in found]
