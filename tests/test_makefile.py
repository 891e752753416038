"""`make help` lists every target that somebody may call."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_help_lists_every_target() -> None:
    text = (ROOT / "Makefile").read_text("utf-8")
    [phony] = re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    found = subprocess.run(
        ["make", "--no-print-directory", "-C", ROOT, "help"],
        check=True,
        capture_output=True,
        text=True,
    )
    listed = dict(line.split(maxsplit=1) for line in found.stdout.splitlines()[1:])
    assert set(listed) == set(phony.split())
