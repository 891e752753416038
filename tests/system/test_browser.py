"""The chat page against the real server, in the system's Chromium."""

from __future__ import annotations

import shutil

import pytest
from playwright.async_api import async_playwright

from ..clients.page_flow import CHROMIUM_ARGS, main_flow
from .processes import Served


@pytest.mark.browser
async def test_a_browser_chats_with_the_demo_model(demo_server: Served) -> None:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=CHROMIUM_ARGS
        )
        page = await browser.new_page()
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on(
            "console",
            lambda message: problems.append(message.text) if message.type == "error" else None,
        )
        await main_flow(page, demo_server.base_url, long_request="Tell me a long story.")
        await browser.close()
    assert problems == []
