"""A system Chromium, and pages in it in which nothing may go wrong."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, async_playwright, expect

from ...support import fetched
from ..processes import Served
from .page_flow import ANSWER_TIMEOUT_MS, CHROMIUM_ARGS

PAGE = Path(__file__).parents[3] / "clients" / "browser"
_PACKAGES = Path(__file__).parent / "node"
# Evaluated in a page: `drawnOf`, what is drawn of Markdown.
MARKDOWN_TREES = Path(__file__).with_name("markdown_trees.js").read_text("utf-8")
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
NewPage = Callable[..., Awaitable[Page]]
expect.set_options(timeout=ANSWER_TIMEOUT_MS)  # much of what is waited for is an answer's end


@pytest.fixture(scope="session")
def packages() -> Path:
    """`node_modules` with what the tests need."""
    return fetched.npm_packages(_PACKAGES)


@pytest.fixture(scope="session")
def axe(packages: Path) -> str:
    """The script of axe-core."""
    return (packages / "axe-core" / "axe.min.js").read_text()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    """The system's; tests that need one are skipped where there is none."""
    path = shutil.which("chromium") or pytest.skip("chromium is not installed")
    async with async_playwright() as playwright:
        started = await playwright.chromium.launch(
            executable_path=path, args=CHROMIUM_ARGS, timeout=ANSWER_TIMEOUT_MS
        )
        yield started
        await started.close()


@pytest_asyncio.fixture(loop_scope="session")
async def new_page(browser: Browser) -> AsyncIterator[NewPage]:
    """Makes pages of one browser profile. No script error, policy violation or request to
    elsewhere may happen in them."""
    context = await browser.new_context(viewport={"width": 1000, "height": 640})
    context.set_default_timeout(ANSWER_TIMEOUT_MS)
    wrong: list[str] = []

    async def make() -> Page:
        page = await context.new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda note: wrong.append(note.text) if "Policy" in note.text else None)
        page.on("request", lambda request: wrong.extend(foreign(request.url)))
        return page

    yield make
    await context.close()
    assert wrong == []


@pytest_asyncio.fixture(loop_scope="session")
async def page(new_page: NewPage) -> Page:
    return await new_page()


@pytest_asyncio.fixture(loop_scope="session")
async def api(demo_server: Served) -> AsyncIterator[httpx.AsyncClient]:
    """Somebody else at the same server."""
    async with httpx.AsyncClient(base_url=f"{demo_server.base_url}/v1/", timeout=120) as client:
        yield client


async def make_conversation(
    api: httpx.AsyncClient, messages: list[tuple[str, str]], title: str = "Made elsewhere"
) -> str:
    """A conversation in which this has been said: (role, text)."""
    made: dict[str, Any] = (
        await api.post("conversations", json={"metadata": {"title": title}})
    ).json()
    items = [{"role": role, "content": text} for role, text in messages]
    for start in range(0, len(items), 20):
        answer = await api.post(
            f"conversations/{made['id']}/items", json={"items": items[start : start + 20]}
        )
        answer.raise_for_status()
    return str(made["id"])


def foreign(url: str) -> list[str]:
    return [] if url.startswith(("http://127.0.0.1", "data:", "blob:")) else [url]


async def violations(page: Page, axe: str) -> list[tuple[str, list[Any]]]:
    """What axe finds serious in the page as it is, in light and dark."""
    found = []
    for scheme in SCHEMES:
        await page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        await page.evaluate(axe)
        found += (await page.evaluate("axe.run()"))["violations"]
    return [
        (violation["id"], [node["target"] for node in violation["nodes"]])
        for violation in found
        if violation["impact"] in ("serious", "critical")
    ]
