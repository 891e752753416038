"""The stock `openai` client for Node against a real server: the cases of `node/suite.mjs`."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from .processes import Served

pytestmark = [pytest.mark.node, pytest.mark.external]

SUITE = Path(__file__).parent / "node" / "suite.mjs"


def test_every_case(node_modules: Path, demo_server: Served) -> None:
    """All run in one process, which tells of each case what went wrong with it, if anything."""
    shutil.copy(SUITE, node_modules)
    done = subprocess.run(
        ["node", SUITE.name, demo_server.base_url],
        cwd=node_modules,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout)
    assert {name: fault for name, fault in outcomes.items() if fault} == {}
    assert len(outcomes) == 18
