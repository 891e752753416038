"""Which sources a figure was made with. Standard library only."""

from __future__ import annotations

import gc
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def commit() -> str:
    """Of this checkout, and whether it has changes; `""` where it is none."""
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


@contextmanager
def frozen_garbage() -> Iterator[None]:
    """What is there now is not searched for garbage meanwhile: that would be a pause.

    The server does the same once it has started.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
