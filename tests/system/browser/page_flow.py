"""What the tests of the chat page do over and over: open it, say something, wait for the end.

What it does not know: which server answers.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from playwright.async_api import Locator, Page, expect

from tests.system.processes import ENDLESS_TOKENS

CHROMIUM_ARGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
ANSWER_TIMEOUT_MS = 100_000
STORY = "Tell me a long story."
# An answer to STORY that `stories` makes of this length does not end before it is stopped.
ENDLESS = ENDLESS_TOKENS
# For answers in Markdown.
CODE = """```python
class Backlog:
    def __init__(self, max_tokens: int) -> None:
        self._free = max_tokens

    def admit(self, num_tokens: int) -> bool:
        if num_tokens > self._free:
            return False
        self._free -= num_tokens
        return True
```"""
_MAX_TOKENS = 700


async def open_page(page: Page, base_url: str, **settings: Any) -> None:
    """The page as soon as it is connected; with what a reader has set before. No answer is longer
    than any that is meant to end, lest a model that has lost its thread fills its context."""
    settings = {"max_output_tokens": _MAX_TOKENS, **settings}
    kept = json.dumps(json.dumps({name: str(value) for name, value in settings.items()}))
    await page.add_init_script(
        f"localStorage['penstock.settings'] ??= {kept};"  # not again when it is loaded anew
    )
    await page.goto(base_url)
    await connected(page)


async def stories(page: Page, num_tokens: int = ENDLESS) -> None:
    """From the next page load on, an answer to STORY has exactly so many tokens."""
    await page.add_init_script(
        """const stringify = JSON.stringify;
        JSON.stringify = (value, ...more) => {
          const isStory = value?.model && stringify(value.input ?? "").includes("long story");
          const limits = { min_tokens: NUM, max_output_tokens: NUM };
          return stringify(isStory ? { ...value, ...limits } : value, ...more);
        };""".replace("NUM", str(num_tokens))
    )


async def stopped(page: Page, turn: Locator) -> str:
    """Stops an answer that would not end of itself; returns what there is of it."""
    await page.keyboard.press("Escape")
    text = await finished(turn)
    await expect(turn).to_contain_text("Stopped.")
    return text


async def connected(page: Page) -> None:
    await expect(page.locator("#connection")).to_have_attribute(
        "data-state", "open", timeout=ANSWER_TIMEOUT_MS
    )


async def say(page: Page, text: str) -> Locator:
    """Sends a message by keyboard; returns its turn, whose answer may still be coming."""
    number = await page.locator(".turn").count()
    await page.get_by_role("textbox", name="Your message").fill(text)
    await page.keyboard.press("Enter")
    turn = page.locator(".turn").nth(number)
    await expect(turn).to_be_attached()
    return turn


async def finished(turn: Locator) -> str:
    """Waits for the end of an answer; returns its text."""
    answer = turn.locator("> .assistant").last
    await expect(answer).to_have_attribute("aria-busy", "false", timeout=ANSWER_TIMEOUT_MS)
    return await answer.locator(".prose").inner_text()


async def ask(page: Page, text: str) -> str:
    return await finished(await say(page, text))


async def growing(turn: Locator, num_chars: int = 40) -> str:
    """Waits until the answer has got so far; returns what is there."""
    prose = turn.locator("> .assistant .prose").last  # found anew each time: it may be replaced
    async with asyncio.timeout(ANSWER_TIMEOUT_MS / 1e3):
        while len(text := await prose.inner_text()) < num_chars:  # noqa: ASYNC110  (a page has none)
            await asyncio.sleep(0.02)
    return text


async def choose(row: Locator, name: str) -> None:
    """Something from the menu of a conversation in the list, by keyboard."""
    await row.get_by_role("link").focus()
    await row.get_by_role("button").press("Enter")
    item = row.page.get_by_role("menuitem", name=name, exact=True)
    await item.focus()
    await row.page.keyboard.press("Enter")


def conversation_of(page: Page) -> str:
    return page.url.partition("#")[2]
