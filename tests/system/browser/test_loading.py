"""The chat page while a conversation is on its way to it, which may take a while."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from playwright.async_api import Page, Route, expect

from ..processes import Served
from .conftest import make_conversation
from .page_flow import STORY, finished, growing, open_page, stopped, stories

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="session")]
SAID = [("user", "I am Ada."), ("assistant", "Hello!")]


async def held_back(page: Page) -> asyncio.Event:
    """No conversation is loaded until this is set."""
    may_load = asyncio.Event()

    async def hold(route: Route) -> None:
        await may_load.wait()
        await route.continue_()

    await page.route("**/tree?items=true", hold)
    return may_load


async def write(page: Page, text: str) -> None:
    """Send a message; it waits, and so no turn of it is there yet."""
    box = page.get_by_role("textbox", name="Your message")
    await box.fill(text)
    await page.keyboard.press("Enter")
    await expect(box).to_have_value("")
    await expect(page.locator(".turn")).to_have_count(0)


async def test_a_message_waits_for_what_was_said_before(
    page: Page, demo_server: Served, api: httpx.AsyncClient
) -> None:
    conversation = await make_conversation(api, SAID)
    await stories(page)
    may_load = await held_back(page)
    await open_page(page, f"{demo_server.base_url}/#{conversation}")
    log = page.get_by_role("log")
    await expect(log).to_have_attribute("aria-busy", "true")
    await write(page, STORY)
    may_load.set()
    turn = page.locator(".turn").nth(1)
    await growing(turn)
    await expect(log).to_have_attribute("aria-busy", "false")
    # All of it is there while the answer grows, and in its order.
    assert await page.locator(".bubble").all_inner_texts() == ["I am Ada.", STORY]
    await stopped(page, turn)


@pytest.mark.exhaustive
async def test_who_goes_elsewhere_meanwhile_finds_the_message_there(
    page: Page, demo_server: Served, api: httpx.AsyncClient
) -> None:
    conversation = await make_conversation(api, SAID)
    may_load = await held_back(page)
    await open_page(page, f"{demo_server.base_url}/#{conversation}")
    await write(page, "What is my name?")
    await page.get_by_role("button", name="New chat").click()
    may_load.set()
    box = page.get_by_role("textbox", name="Your message")
    await expect(page.locator("#refusal")).to_contain_text("Your message was not sent")
    await expect(box).to_have_value("")
    await expect(page.locator(".turn")).to_have_count(0)
    tree = (await api.get(f"conversations/{conversation}/tree")).json()
    assert len(tree["data"]) == 1  # nothing of it got there
    await page.go_back()
    await expect(box).to_have_value("What is my name?")
    await expect(page.locator("#refusal")).to_be_hidden()
    await box.press("Enter")
    assert await finished(page.locator(".turn").nth(1))


@pytest.mark.exhaustive
async def test_a_conversation_that_cannot_be_loaded_gives_the_message_back(
    page: Page, demo_server: Served, api: httpx.AsyncClient
) -> None:
    conversation = await make_conversation(api, SAID)
    may_load = asyncio.Event()

    async def fail(route: Route) -> None:
        await may_load.wait()
        await route.fulfill(status=503, body="{}")

    await page.route("**/tree?items=true", fail)
    await open_page(page, f"{demo_server.base_url}/#{conversation}")
    await write(page, "What is my name?")
    may_load.set()
    box = page.get_by_role("textbox", name="Your message")
    await expect(box).to_have_value("What is my name?")
    problem = page.locator("#refusal")
    await expect(problem).to_contain_text("This conversation could not be loaded.")
    await page.reload()  # nothing is sent
    await expect(problem).to_contain_text("This conversation could not be loaded.")
    await expect(page.get_by_role("log")).to_have_attribute("aria-busy", "false")
