"""Packages of third-party clients."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..support import fetched

PACKAGES = Path(__file__).parent / "examples"
CODEX = "@openai/codex@0.169.0"
CLAUDE_CODE = "@anthropic-ai/claude-code@2.1.332"
PYTHON_CLIENTS = ("langchain-openai==1.7.3", "litellm==1.106.2", "openai-agents==0.20.0")


@pytest.fixture(scope="session")
def node_modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this session with the packages that scripts of Node need beside them."""
    folder = tmp_path_factory.mktemp("node")
    (folder / "node_modules").symlink_to(fetched.npm_packages(PACKAGES))
    return folder


@pytest.fixture(scope="session")
def langchain() -> Path:
    """A Python that has LangChain and other clients, apart from the project's own packages."""
    return fetched.python_environment(PYTHON_CLIENTS)


@pytest.fixture(scope="session")
def codex() -> Path:
    """The command of OpenAI's Codex."""
    return fetched.npm_program(CODEX, "codex")


@pytest.fixture(scope="session")
def claude_code() -> Path:
    """The command of Anthropic's Claude Code: its program for this machine, without the script that
    would put it in the place of a wrapper."""
    wrapper = fetched.npm_program(CLAUDE_CODE, "claude")
    [program] = (wrapper.parents[1] / "@anthropic-ai").glob("claude-code-*/claude")
    return program
