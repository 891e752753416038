"""Objects that match a schema, by third-party clients: Vercel's AI SDK and LangChain."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from ..system.processes import Served
from .packages import PACKAGES


def run(command: Sequence[str | Path], server: Served, *, cwd: Path) -> str:
    environment = os.environ | {"PENSTOCK_URL": server.base_url}
    done = subprocess.run(
        command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.node
@pytest.mark.external
def test_ai_sdk(demo_server: Served, node_modules: Path) -> None:
    shutil.copy(PACKAGES / "objects.mjs", node_modules)
    outcomes = json.loads(run(["node", "objects.mjs"], demo_server, cwd=node_modules))
    assert {name: fault for name, fault in outcomes.items() if fault} == {}
    assert len(outcomes) == 19


@pytest.mark.external
def test_langchain(demo_server: Served, langchain: Path, tmp_path: Path) -> None:
    assert run([langchain, PACKAGES / "objects.py"], demo_server, cwd=tmp_path) == "done\n"
