"""Which sources a figure was made with. Standard library only."""

from __future__ import annotations

import subprocess
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
