"""Packages of third-party clients, which come from their registries once and are kept."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PACKAGES = Path(__file__).parent / "examples"
CACHE = Path(__file__).parents[2] / "build" / "examples"
CODEX = "@openai/codex@0.169.0"
PYTHON_CLIENTS = ("langchain-openai==1.7.3", "litellm==1.106.2", "openai-agents==0.20.0")


@contextmanager
def stale(folder: Path, wanted: bytes) -> Iterator[bool]:
    """Whether a folder of the cache lacks what is wanted; it is empty then, and the caller fills
    it, while other test processes wait."""
    CACHE.mkdir(parents=True, exist_ok=True)
    mark = folder / "installed"
    with (CACHE / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if mark.is_file() and mark.read_bytes() == wanted:
            yield False
            return
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        yield True
        mark.write_bytes(wanted)


@pytest.fixture(scope="session")
def node_modules() -> Path:
    """A folder with the packages that scripts of Node need beside them."""
    folder, lock = CACHE / "node", (PACKAGES / "package-lock.json").read_bytes()
    with stale(folder, lock) as is_stale:
        if is_stale:
            for name in ("package.json", "package-lock.json"):
                shutil.copy(PACKAGES / name, folder)
            command = ["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"]
            subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=240)
    return folder


@pytest.fixture(scope="session")
def langchain() -> Path:
    """A Python that has LangChain and other clients, apart from the project's own packages."""
    folder = CACHE / "langchain"
    python = folder / "bin" / "python"
    with stale(folder, "\n".join(PYTHON_CLIENTS).encode()) as is_stale:
        if is_stale:
            subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=240)
            command = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
            command += ["--no-compile", *PYTHON_CLIENTS]
            subprocess.run(command, check=True, capture_output=True, timeout=240)
    return python


@pytest.fixture(scope="session")
def codex() -> Path:
    """The command of OpenAI's Codex."""
    folder = CACHE / "codex"
    with stale(folder, CODEX.encode()) as is_stale:
        if is_stale:
            command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", CODEX]
            subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=240)
    return folder / "node_modules" / ".bin" / "codex"
