"""Each example of `clients/examples`, run as its first lines say, against the real server."""

from __future__ import annotations

import http.server
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from playwright.async_api import async_playwright, expect

from ..support.real_models import smollm2_site
from ..system.processes import Served, serve

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "clients" / "examples"
_PATIENCE_MS = 60_000
RUN_BY_A_TEST = {
    "openai_python.py", "openai_node.mjs", "ai_sdk.mjs", "langchain_python.py",
    "penstock_python.py", "penstock_blocking.py", "curl.sh", "page.html", "codex.toml",
    "extract_python.py",
}  # fmt: skip


def output(command: list[str], server: Served, *, cwd: Path | None = None) -> str:
    environment = os.environ | {"PENSTOCK_URL": server.base_url}
    result = subprocess.run(
        command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def scripts(node_modules: Path) -> Path:
    """The examples beside their packages."""
    for example in EXAMPLES.glob("*.mjs"):
        shutil.copy(example, node_modules)
    return node_modules


def test_every_example_is_run_here() -> None:
    assert {path.name for path in EXAMPLES.iterdir() if path.is_file()} == RUN_BY_A_TEST


def test_openai_python(demo_server: Served) -> None:
    told = output([sys.executable, str(EXAMPLES / "openai_python.py")], demo_server)
    assert "block" in told.splitlines()[0]
    assert told.splitlines()[1]


def test_penstock_python(demo_server: Served) -> None:
    told = output([sys.executable, str(EXAMPLES / "penstock_python.py")], demo_server)
    lines = told.splitlines()
    assert lines[0] == "What is paged attention?"
    assert "block" in lines[1]


def test_penstock_blocking(demo_server: Served) -> None:
    told = output([sys.executable, str(EXAMPLES / "penstock_blocking.py")], demo_server)
    assert "block" in told.splitlines()[0]
    assert told.splitlines()[1]


@pytest.mark.exhaustive
def test_extract_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(smollm2_site()), prepend=os.pathsep)
    with serve("smollm2", log=tmp_path / "log") as server:
        told = output([sys.executable, str(EXAMPLES / "extract_python.py")], server)
    assert told.splitlines() == ["name='Ada' age=36", "name='Tom' age=12"]


@pytest.mark.node
@pytest.mark.external
def test_openai_node(demo_server: Served, scripts: Path) -> None:
    told = output(["node", "openai_node.mjs"], demo_server, cwd=scripts)
    assert "block" in told.splitlines()[0]
    assert told.splitlines()[1]


@pytest.mark.node
@pytest.mark.external
def test_ai_sdk(demo_server: Served, scripts: Path) -> None:
    told = output(["node", "ai_sdk.mjs"], demo_server, cwd=scripts)
    text, tokens = told.splitlines()
    assert "block" in text
    assert int(tokens.removeprefix("(").split()[0]) > 5


@pytest.mark.external
def test_langchain(demo_server: Served, langchain: Path) -> None:
    told = output([str(langchain), str(EXAMPLES / "langchain_python.py")], demo_server)
    assert "block" in told


@pytest.mark.curl
def test_curl(demo_server: Served) -> None:
    """What comes after the break begins where the first part ended."""
    told = output([str(EXAMPLES / "curl.sh")], demo_server)
    numbers = [
        int(line.partition('"sequence_number":')[2].split(",")[0]) for line in told.splitlines()
    ]
    assert numbers == list(range(len(numbers)))
    assert '"type":"response.completed"' in told.splitlines()[-1]


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def elsewhere() -> Iterator[str]:
    """A web server that has the examples' page and nothing to do with penstock."""
    handler = partial(_Quiet, directory=str(EXAMPLES))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.browser
@pytest.mark.exhaustive
async def test_page(elsewhere: str, tmp_path: Path) -> None:
    with serve("--dtype", "float32", "--allowed-origins", elsewhere, log=tmp_path / "log") as own:
        async with async_playwright() as playwright:
            browser = await playwright.chromium.launch(
                executable_path=shutil.which("chromium"),
                args=["--no-sandbox", "--disable-gpu"],
                timeout=_PATIENCE_MS,
            )
            page = await browser.new_page()
            page.set_default_timeout(_PATIENCE_MS)
            await page.goto(f"{elsewhere}/page.html?server={own.base_url}")
            for number, question in enumerate(("Hi, my name is Orlan.", "What is my name?")):
                # It is connected, and the answer before has ended.
                await expect(page.get_by_role("button")).to_be_enabled(timeout=_PATIENCE_MS)
                await page.get_by_placeholder("Ask something").fill(question)
                await page.keyboard.press("Enter")
                answer = page.locator("#talk p").nth(number)
                await expect(answer).to_contain_text("Orlan", timeout=_PATIENCE_MS)
            await browser.close()
