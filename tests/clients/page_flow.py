"""The main use of the chat page, written so that any server with the demo model passes it.

What it does not know: which server answers. The stub and the real one are both driven by this.
"""

import re

from playwright.async_api import Locator, Page, expect

CHROMIUM_ARGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
ANSWER_TIMEOUT_MS = 60_000


async def open_page(page: Page, base_url: str) -> None:
    await page.goto(base_url)
    await expect(page.locator("#connection")).to_have_attribute("data-state", "open")


async def say(page: Page, text: str) -> Locator:
    """Sends a message by keyboard; returns its answer, which may still be coming."""
    number = await page.locator(".message.assistant").count()
    await page.get_by_role("textbox", name="Your message").fill(text)
    await page.keyboard.press("Enter")
    answer = page.locator(".message.assistant").nth(number)
    await expect(answer).to_be_attached()
    return answer


async def finished(answer: Locator) -> str:
    """Waits for the end of an answer; returns its text."""
    await expect(answer).to_have_attribute("aria-busy", "false", timeout=ANSWER_TIMEOUT_MS)
    return await answer.locator(".prose").inner_text()


async def ask(page: Page, text: str) -> str:
    return await finished(await say(page, text))


async def main_flow(page: Page, base_url: str, *, long_request: str) -> None:
    """Several turns with memory, figures, stop in the middle, going on after it, a new chat."""
    await open_page(page, base_url)
    await page.get_by_role("button", name="My name is Ada").click()
    first = page.locator(".message.assistant").first
    assert await finished(first)
    await expect(first.locator(".stats")).to_contain_text(re.compile(r"first token after [\d.]+ s"))
    await expect(first.locator(".stats")).to_contain_text(re.compile(r"\d+ tokens?"))
    assert "Ada" in await ask(page, "What is my name?")

    story = await say(page, long_request)
    await expect(story.locator(".prose")).to_contain_text(re.compile(r"\w{2}"))
    await expect(story.locator(".stats")).to_contain_text("tokens/s", timeout=ANSWER_TIMEOUT_MS)
    await page.get_by_role("button", name="Stop").click()
    assert await finished(story)
    await expect(story).to_contain_text("Stopped.")

    assert "Ada" in await ask(page, "What is my name?")
    await page.get_by_role("button", name="New chat").click()
    await expect(page.locator(".message")).to_have_count(0)
    await expect(page.locator("#welcome")).to_be_visible()
    assert "Ada" not in await ask(page, "What is my name?")
