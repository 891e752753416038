"""Thoughts and tool calls on the chat page: shown as blocks, each call run once."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest
from playwright.async_api import Page, expect

from ..processes import END_S, Served
from .conftest import NewPage
from .page_flow import connected, conversation_of, finished, open_page, say

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="session")]

ON: dict[str, Any] = {"tools": "on", "think": "on", "temperature": 0}


async def items(demo_server: Served, page: Page) -> list[dict[str, Any]]:
    async with httpx.AsyncClient(base_url=demo_server.base_url, timeout=END_S) as client:
        path = f"/v1/conversations/{conversation_of(page)}/items?order=asc"
        listed: list[dict[str, Any]] = (await client.get(path)).json()["data"]
        return listed


async def test_a_call_is_run_and_shown(new_page: NewPage, demo_server: Served) -> None:
    page = await new_page()
    await open_page(page, demo_server.base_url, **ON)
    turn = await say(page, "what is 12 plus 30?")
    await expect(turn.locator(".prose")).to_contain_text("42")
    await finished(turn)
    thought, call = turn.locator(".block.reasoning"), turn.locator(".block.call")
    await expect(thought.first.locator("summary")).to_have_text(re.compile(r"Thought( for \d+ s)?"))
    await expect(thought.first).not_to_have_attribute("open", "")
    await expect(call.locator("summary")).to_have_text("Called calculator → 42")
    await call.locator("summary").click()
    await expect(call.locator(".said")).to_be_visible()
    await expect(call.locator(".said")).to_contain_text('"expression": "12 + 30"')
    await expect(call.locator(".result")).to_have_text("42")
    kinds = [item["type"] for item in await items(demo_server, page)]
    assert [kind for kind in kinds if kind != "reasoning"] == [
        "message",
        "function_call",
        "function_call_output",
        "message",
    ]
    shown = await turn.inner_text()
    await page.reload()
    await connected(page)
    again = page.locator(".turn")
    await expect(again).to_have_count(1)
    await expect(again.locator(".prose")).to_contain_text("42")
    await expect(again.locator(".block.call summary")).to_have_text("Called calculator → 42")
    assert "Called calculator" in shown


@pytest.mark.parametrize(("think", "effort"), [("on", "low"), ("", "none")])
@pytest.mark.exhaustive
async def test_whether_to_think_is_always_said(
    new_page: NewPage, demo_server: Served, think: str, effort: str
) -> None:
    """Some models think unless they are told not to."""
    page = await new_page()
    sent: list[str | bytes] = []
    page.on("websocket", lambda socket: socket.on("framesent", lambda data: sent.append(data)))
    await open_page(page, demo_server.base_url, think=think)
    await finished(await say(page, "Hello!"))
    asked = [json.loads(frame) for frame in sent]
    [request] = [each for each in asked if each["type"] == "response.create"]
    assert request["reasoning"] == {"effort": effort}


@pytest.mark.exhaustive
async def test_what_was_called_before_a_reload_is_run_after_it(
    new_page: NewPage, demo_server: Served
) -> None:
    """The outputs were not sent; then another tab is there too. Each call is run once."""
    page = await new_page()
    await open_page(page, demo_server.base_url, **ON)
    # A tab that is closed in this very moment: nothing follows the first answer.
    held = "void navigator.locks.request('penstock.tools', () => new Promise(() => {}))"
    await page.evaluate(held)
    turn = await say(page, "note: buy milk")
    await expect(turn.locator(".block.call summary")).to_have_text("Called note")
    await expect(turn.locator("> .assistant")).to_have_attribute("aria-busy", "false")
    kinds = [item["type"] for item in await items(demo_server, page)]
    assert kinds[-1] == "function_call"
    await page.reload()
    await connected(page)
    turn = page.locator(".turn").first
    await expect(turn.locator(".block.call summary")).to_contain_text("saved as note 1")
    await expect(turn.locator(".prose")).to_contain_text("buy milk")
    other = await new_page()
    await other.goto(page.url)
    await connected(other)
    await expect(other.locator(".turn .prose").first).to_contain_text("buy milk")
    kinds = [item["type"] for item in await items(demo_server, page)]
    assert kinds.count("function_call_output") == 1
    notes = await page.evaluate("JSON.parse(localStorage['penstock.notes'])")
    assert notes == ["buy milk"]


@pytest.mark.exhaustive
async def test_without_the_switches_nothing_is_offered(
    new_page: NewPage, demo_server: Served
) -> None:
    page = await new_page()
    await open_page(page, demo_server.base_url, temperature=0)
    turn = await say(page, "Hello!")
    await finished(turn)
    await expect(turn.locator(".block")).to_have_count(0)
    await page.keyboard.press("Alt+s")
    for name in ("call a calculator, a clock and a note keeper", "think before it answers"):
        await page.get_by_label(name).check()
    await page.get_by_role("button", name="Done").click()
    turn = await say(page, "what is 2 * (3 + 4)?")
    await finished(turn)
    await expect(turn.locator(".block.reasoning")).not_to_have_count(0)


@pytest.mark.exhaustive
async def test_the_calculator(new_page: NewPage, demo_server: Served) -> None:
    page = await new_page()
    await open_page(page, demo_server.base_url)
    computed = """(text) => import("./tools.js").then(({ computed }) => {
        try { return computed(text); } catch (error) { return String(error); }
    })"""
    for text, value in (("12 + 30", 42), ("2 * (3 - 4.5)", -3), ("-7 / 2", -3.5), ("1 - -1", 2)):
        assert await page.evaluate(computed, text) == value
    for text in ("2 **", "alert(1)", "1 2", "(1", "", "1" * 201):
        assert "Error" in await page.evaluate(computed, text)
