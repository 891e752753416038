"""The commit, the machine, paused garbage collection, and a timer for calls. Standard library
only, since the timer also times imports."""

from __future__ import annotations

import functools
import gc
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeAlias


def commit() -> str:
    """The checkout's commit, and whether it has changes; `""` outside a checkout."""
    head = _git("rev-parse", "--short=12", "HEAD")
    return f"{head} with changes" if head and _git("status", "--porcelain", "-uno") else head


def _git(*words: str) -> str:
    try:
        done = subprocess.run(  # noqa: S603
            ["git", *words],  # noqa: S607
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:  # there is no git
        return ""
    return done.stdout.strip()


def machine() -> dict[str, Any]:
    """What figures depend on most."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text("utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


@contextmanager
def frozen_garbage() -> Iterator[None]:
    """Exempt existing objects from garbage collection during the block, as the server does once it
    has started: collecting them would be a pause."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


# -- timing calls --------------------------------------------------------------------------------

# A part's name → where its work is done: an owner (a class or a module) and a name in it.
Places: TypeAlias = Mapping[str, Sequence[tuple[Any, str]]]


def no_wait() -> None:
    """For devices whose work is done when the call returns."""


class CallTimer:
    """Adds up the seconds spent in each part; the timed code itself is not changed.

    None of the places may call another, or its time would count twice. `wait` returns when the
    device has done what a call launched.
    """

    def __init__(self, places: Places, *, wait: Callable[[], object] = no_wait) -> None:
        self._places = places
        self._wait = wait
        self._seconds = dict.fromkeys(places, 0.0)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Time this process's calls until the end of the block."""
        with ExitStack() as stack:
            for part, places in self._places.items():
                for owner, name in places:
                    original = getattr(owner, name)
                    stack.callback(setattr, owner, name, original)
                    setattr(owner, name, self._timed(part, original))
            yield

    def take(self) -> dict[str, float]:
        """Seconds of every part since the last call."""
        seconds, self._seconds = self._seconds, dict.fromkeys(self._places, 0.0)
        return seconds

    def _timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def timed(*args: Any, **settings: Any) -> Any:
            began_s = time.perf_counter()
            result = call(*args, **settings)
            self._wait()
            self._seconds[part] += time.perf_counter() - began_s
            return result

        return timed
