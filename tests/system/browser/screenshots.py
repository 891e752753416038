"""Pictures of the chat page, taken of a real server: `python -m tests.system.browser.screenshots`,
or of one of its models with `demo` or `smollm2`.

They go to `clients/browser/screenshots/`. Look at them after every change of the page.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from pathlib import Path

import httpx
from playwright.async_api import Browser, Page, ViewportSize, async_playwright

from tests.support.real_models import smollm2_site
from tests.system.browser.conftest import make_conversation
from tests.system.browser.page_flow import CHROMIUM_ARGS, CODE, ask, growing, open_page, say
from tests.system.processes import Served, serve

_FOLDER = Path(__file__).parents[3] / "clients" / "browser" / "screenshots"
_WIDE = ViewportSize(width=1180, height=760)
_NARROW = ViewportSize(width=390, height=760)
_SIZES = ((360, 640), (768, 1024), (1024, 768), (1280, 800), (1920, 1080))
_TITLES = ("Names to remember", "A fox and a lantern", "Counting")
_QUESTIONS = (
    "What is the capital of France?",
    "Explain photosynthesis in one sentence.",
    "Give me three tips for a good night's sleep.",
)
_CODE = f"""A queue bounded by *tokens*, not by requests:

{CODE}

1. **Short prompts** pass while a long one waits.
2. What is refused is told *when to come back*: after $t = n / r$ seconds.

| policy | waits |
|---|---:|
| first come | as long as the longest |
| shortest first | **least** on average |
"""


async def _page(browser: Browser, size: ViewportSize, *, is_dark: bool = False) -> Page:
    is_phone = size["width"] < 480
    context = await browser.new_context(
        viewport=size,
        color_scheme="dark" if is_dark else "light",
        reduced_motion="reduce",
        has_touch=is_phone,
        is_mobile=is_phone,
    )
    return await context.new_page()


async def _take(page: Page, name: str) -> None:
    await page.mouse.move(0, 0)
    await page.wait_for_timeout(400)
    await page.screenshot(path=_FOLDER / f"{name}.png")
    print(f"{name}.png")


async def _take_all(browser: Browser, served: Served) -> None:
    async with httpx.AsyncClient(base_url=f"{served.base_url}/v1/", timeout=60) as api:
        for title in _TITLES:
            await make_conversation(api, [("user", title)], title=title)
        said = [("user", "How would you bound a queue?"), ("assistant", _CODE)]
        code = await make_conversation(api, said, title="Bounding a queue")
        (await api.post(f"conversations/{code}", json={"pinned": True})).raise_for_status()
    for width, height in _SIZES:
        for is_dark in (False, True):
            page = await _page(browser, ViewportSize(width=width, height=height), is_dark=is_dark)
            await open_page(page, f"{served.base_url}/#{code}")
            # The last line has its colours when nothing more comes.
            await page.locator(".hl-keyword", has_text="return").nth(1).wait_for()
            await _take(page, f"size-{width}-{'dark' if is_dark else 'light'}")
            await page.context.close()
    light = await _page(browser, _WIDE)
    await open_page(light, served.base_url, temperature=0)
    await _take(light, "welcome")
    await ask(light, "My name is Ada. Please remember it.")
    await ask(light, "How does paged attention work?")
    turn = light.locator(".turn").last
    await turn.get_by_role("button", name="Regenerate").click()
    await turn.locator(".place").wait_for()
    await turn.get_by_role("button", name="Figures").click()
    await ask(light, "What is my name?")
    await _take(light, "light")
    await light.get_by_role("button", name="Settings").click()
    await _take(light, "settings")
    dark = await _page(browser, _WIDE, is_dark=True)
    await open_page(dark, f"{served.base_url}/#{code}", temperature=0)
    await growing(await say(dark, "Tell me a long story."), 300)
    await dark.keyboard.press("Escape")
    await dark.get_by_role("button", name="Continue").wait_for()
    await _take(dark, "dark")
    narrow = await _page(browser, _NARROW)
    await open_page(narrow, f"{served.base_url}/#{code}", temperature=0)
    await ask(narrow, "What is penstock?")
    await _take(narrow, "narrow")
    await narrow.get_by_role("button", name="Conversations", exact=True).click()
    await _take(narrow, "narrow-list")


async def _take_real(browser: Browser, served: Served) -> None:
    page = await _page(browser, _WIDE)
    await open_page(page, served.base_url, temperature=0)
    for question in _QUESTIONS:
        await ask(page, question)
    await _take(page, "smollm2")


async def main() -> None:
    """Takes those of the demo model, and one of SmolLM2."""
    _FOLDER.mkdir(exist_ok=True)
    os.environ["PYTHONPATH"] = str(smollm2_site())
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=CHROMIUM_ARGS
        )
        for model, take in (("demo", _take_all), ("smollm2", _take_real)):
            if model not in (sys.argv[1:] or [model]):
                continue
            with (
                tempfile.TemporaryDirectory() as folder,
                serve(model, log=Path(folder) / "log") as served,
            ):
                await take(browser, served)
        await browser.close()


if __name__ == "__main__":
    asyncio.run(main())
