"""The stock `openai` client for Node against a real server: the cases of `node/suite.mjs`."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from .processes import Served

pytestmark = pytest.mark.node

SUITE = Path(__file__).parent / "node"
CACHE = Path(__file__).parents[2] / "build" / "node"
CASES = re.findall(r'^  async "(.+)"\(\)', (SUITE / "suite.mjs").read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def installed() -> Path:
    """The suite beside its package, which comes from the registry once and is kept."""
    CACHE.mkdir(parents=True, exist_ok=True)
    lock = (SUITE / "package-lock.json").read_bytes()
    mark = CACHE / "node_modules" / "installed"
    if not mark.is_file() or mark.read_bytes() != lock:
        shutil.copy(SUITE / "package.json", CACHE)
        shutil.copy(SUITE / "package-lock.json", CACHE)
        command = ["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"]
        subprocess.run(command, cwd=CACHE, check=True, capture_output=True, timeout=240)
        mark.write_bytes(lock)
    shutil.copy(SUITE / "suite.mjs", CACHE)
    return CACHE


@pytest.fixture(scope="module")
def outcomes(installed: Path, demo_server: Served) -> Mapping[str, str | None]:
    """What went wrong with each case, if anything; all run in one process."""
    result = subprocess.run(
        ["node", "suite.mjs", demo_server.base_url],
        cwd=installed,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    told: Mapping[str, str | None] = json.loads(result.stdout)
    return told


@pytest.mark.parametrize("name", CASES)
def test_case(outcomes: Mapping[str, str | None], name: str) -> None:
    assert outcomes[name] is None, outcomes[name]


def test_every_case_ran(outcomes: Mapping[str, str | None]) -> None:
    assert list(outcomes) == CASES
    assert len(CASES) > 10
