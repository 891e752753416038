"""Tool loops by third-party clients: openai and Anthropic's SDK for Node, the AI SDK, LangChain,
litellm and OpenAI's agents, unedited."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ..system.processes import Served
from .packages import PACKAGES
from .test_structured_clients import run


@pytest.mark.node
@pytest.mark.external
def test_node(demo_server: Served, node_modules: Path) -> None:
    shutil.copy(PACKAGES / "tools.mjs", node_modules)
    outcomes = json.loads(run(["node", "tools.mjs"], demo_server, cwd=node_modules))
    assert {name: fault for name, fault in outcomes.items() if fault} == {}
    assert len(outcomes) == 12


@pytest.mark.node
@pytest.mark.external
def test_node_with_anthropics_api(demo_server: Served, node_modules: Path) -> None:
    shutil.copy(PACKAGES / "anthropic.mjs", node_modules)
    outcomes = json.loads(run(["node", "anthropic.mjs"], demo_server, cwd=node_modules))
    assert {name: fault for name, fault in outcomes.items() if fault} == {}
    assert len(outcomes) == 10


@pytest.mark.external
def test_python(demo_server: Served, langchain: Path, tmp_path: Path) -> None:
    said = run([langchain, PACKAGES / "tools.py"], demo_server, cwd=tmp_path)
    assert said.endswith("done\n")
