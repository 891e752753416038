"""A message that is sent while an answer runs interrupts it, and is answered."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from playwright.async_api import Page, Route, expect

from ..processes import Served, serve
from .conftest import NewPage
from .page_flow import STORY, connected, finished, growing, open_page, say, stopped, stories

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="session")]


async def _interrupt(page: Page, text: str = STORY) -> None:
    """Another message, while the last one is being answered; what was written stays."""
    number = await page.locator(".turn").count()
    turn = page.locator(".turn").nth(number - 1)
    said = await growing(turn)
    await say(page, text)
    await expect(turn).to_contain_text("Interrupted.")
    assert (await finished(turn)).startswith(said)
    await growing(page.locator(".turn").nth(number))


@pytest.mark.exhaustive
async def test_a_message_interrupts_the_answer_and_is_answered(
    page: Page, demo_server: Served
) -> None:
    await stories(page)
    await open_page(page, demo_server.base_url, temperature=0)
    send = page.locator("#send")
    await say(page, STORY)
    await expect(send).to_have_attribute("aria-label", "Stop")
    await page.get_by_role("textbox", name="Your message").fill("x")
    await expect(send).to_have_attribute("aria-label", "Send")
    await _interrupt(page)
    await stopped(page, page.locator(".turn").nth(1))
    texts = await page.locator(".turn .prose").all_inner_texts()
    await page.reload()
    await connected(page)
    await expect(page.locator(".turn")).to_have_count(2)
    assert await page.locator(".turn .prose").all_inner_texts() == texts
    await expect(page.locator(".turn").first).to_contain_text("Interrupted.")


@pytest.mark.exhaustive
async def test_a_message_that_comes_too_late_interrupts_the_next_answer(
    page: Page, demo_server: Served
) -> None:
    """The server gets it when the answer has already ended for the one before."""
    held = [asyncio.Event(), asyncio.Event()]
    sent = iter(held)

    async def hold(route: Route) -> None:
        if (may_go := next(sent, None)) is not None:
            await may_go.wait()
        await route.continue_()

    await page.route("**/steer", hold)
    await stories(page)
    await open_page(page, demo_server.base_url, temperature=0)
    turns = page.locator(".turn")
    await growing(await say(page, STORY))
    await say(page, "Shorter, please.")
    await say(page, "And in verse.")
    held[0].set()
    said = await growing(turns.nth(1))
    held[1].set()
    await expect(turns.nth(1)).to_contain_text("Interrupted.")
    assert (await finished(turns.nth(1))).startswith(said)
    await stopped(page, turns.nth(2))
    texts = await page.locator(".turn .prose").all_inner_texts()
    await page.reload()
    await connected(page)
    await expect(turns).to_have_count(3)
    await expect(turns.nth(2)).to_contain_text("And in verse.")
    assert await page.locator(".turn .prose").all_inner_texts() == texts


@pytest.mark.exhaustive
@pytest.mark.process_kills
@pytest.mark.parametrize("has_websocket", [True, False])
async def test_three_in_a_row_while_the_engine_is_killed(
    new_page: NewPage, long_model: tuple[str, ...], tmp_path: Path, has_websocket: bool
) -> None:
    page = await new_page()
    if not has_websocket:
        await page.add_init_script("delete window.WebSocket")
    await stories(page)
    with serve(*long_model, "--dtype", "float32", log=tmp_path / "log") as served:
        await open_page(page, served.base_url, temperature=0)
        await say(page, STORY)
        await _interrupt(page)
        served.child("penstock-engine").kill()
        await _interrupt(page)
        await _interrupt(page)
        await stopped(page, page.locator(".turn").nth(3))
        texts = await page.locator(".turn .prose").all_inner_texts()
        await page.reload()
        await connected(page)
        await expect(page.locator(".turn")).to_have_count(4)
        assert await page.locator(".turn .prose").all_inner_texts() == texts
