"""Every kernel compiles for NVIDIA and AMD, within the device's memory and registers.

Compiled ahead of time in a process of its own: one that interprets kernels cannot compile them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .compile_case import TARGETS

HERE = Path(__file__).parent
FILES = sorted(path.stem for path in (HERE / "compile_cases").glob("[!_]*.py"))
MAX_SHARED_BYTES = {"sm_90": 227 * 1024, "gfx942": 64 * 1024}
MAX_SPILL_BYTES = 16  # what a few registers take, set aside outside the loops


@pytest.fixture(scope="module")
def reports() -> list[dict[str, Any]]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, str(HERE / "compile_all.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("file", FILES)
def test_it_compiles_and_fits(file: str, target: str, reports: list[dict[str, Any]]) -> None:
    found = [item for item in reports if (item["file"], item["target"]) == (file, target)]
    assert found
    for item in found:
        assert "error" not in item, f"{item['label']}: {item['error']}"
        assert item["shared_bytes"] <= MAX_SHARED_BYTES[target], item
        assert (item["spill_bytes"] or 0) <= MAX_SPILL_BYTES, item
