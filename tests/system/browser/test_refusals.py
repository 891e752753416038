"""What the page says when the server, or the page itself, does not take something."""

from __future__ import annotations

import asyncio
import json
import re

import httpx
import pytest
from playwright.async_api import Locator, Page, Route, expect

from ..processes import NUM_CONTEXT_TOKENS, Served
from .conftest import make_conversation
from .page_flow import STORY, ask, choose, connected, finished, growing, open_page, say, stories

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="session")]

_WRITE = """(text) => {
  const box = document.getElementById("composer-text");
  box.value = text;
  box.dispatchEvent(new Event("input"));
  box.focus();
}"""


@pytest.mark.exhaustive
async def test_a_message_that_no_connection_takes(page: Page, demo_server: Served) -> None:
    """It costs nobody the connection, and can be written anew in its place."""
    await open_page(page, demo_server.base_url, temperature=0)
    await ask(page, "My name is Ada.")
    await page.evaluate(_WRITE, "word " * 210_000)
    await page.keyboard.press("Enter")
    turn = page.locator(".turn").last
    await expect(turn).to_contain_text("larger than 1 MiB")
    await expect(page.locator("#connection")).to_have_attribute("data-state", "open")
    async with page.expect_response("**/tree*"):
        await page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")  # looked at
    await expect(turn).to_contain_text("larger than 1 MiB")
    await expect(turn.locator(".note").get_by_role("button")).to_have_text(["Edit message"])
    await page.keyboard.press("ArrowUp")
    await page.get_by_role("textbox", name="Edit your message").fill("What is my name?")
    await page.keyboard.press("Enter")
    assert "Ada" in await finished(page.locator(".turn").nth(1))
    await expect(page.locator(".turn")).to_have_count(2)


@pytest.mark.exhaustive
async def test_a_message_longer_than_the_context(page: Page, demo_server: Served) -> None:
    """Its size is told, and it can be edited; the page never loses it."""
    await open_page(page, demo_server.base_url)
    text = ("much " * 40_000).strip()
    await page.evaluate(_WRITE, text)
    await page.keyboard.press("Enter")
    note = page.locator(".note")
    size = (
        rf"too long: it has 4\d{{4}} tokens, and the model's context, .* has {NUM_CONTEXT_TOKENS}\."
    )
    await expect(note).to_contain_text(re.compile(size))
    await expect(note.get_by_role("button")).to_have_text(["Edit message"])
    await expect(page.get_by_role("button", name="Regenerate")).to_have_count(0)  # in vain, too
    await expect(page.locator("#composer-text")).to_have_value("")
    await page.reload()  # the server does not have it
    await connected(page)
    await expect(page.locator("#composer-text")).to_have_value(text)
    await page.keyboard.press("Enter")
    await note.get_by_role("button").click()
    editor = page.get_by_role("textbox", name="Edit your message")
    await expect(editor).to_be_focused()
    await expect(editor).to_have_value(text)
    await editor.fill("Hello!")
    await page.keyboard.press("Enter")
    await expect(page.locator("#composer-text")).to_be_focused()
    await expect(page.locator(".bubble")).to_have_text("Hello!")
    assert await finished(page.locator(".turn"))
    await page.reload()  # now it does
    await expect(page.locator(".bubble")).to_have_text("Hello!")
    await expect(page.locator("#composer-text")).to_have_value("")


@pytest.mark.exhaustive
async def test_a_conversation_that_has_filled_the_context(
    page: Page, demo_server: Served, api: httpx.AsyncClient
) -> None:
    half = "much " * (NUM_CONTEXT_TOKENS // 2)
    conversation = await make_conversation(api, [("user", half), ("assistant", half)])
    await open_page(page, f"{demo_server.base_url}/#{conversation}", max_output_tokens=5)
    more = page.locator(".bubble-more")
    await expect(more).to_have_text("Show all")
    await say(page, "What is my name?")
    note = page.locator(".is-error")
    await expect(note).to_contain_text(
        re.compile(rf"filled the model's context of {NUM_CONTEXT_TOKENS} tokens: the \d+ tokens of")
    )
    await expect(note.get_by_role("button")).to_have_text(
        ["Start anew with this message", "Edit message"]
    )
    await note.get_by_role("button", name="Start anew").click()
    await expect(page.locator(".turn")).to_have_count(1)
    assert await finished(page.locator(".turn"))
    await expect(page.locator("#composer-text")).to_have_value("")
    await page.go_back()
    await page.go_back()
    await expect(more).to_be_visible()
    await expect(page.locator("#composer-text")).to_have_value("")


@pytest.mark.exhaustive
async def test_a_long_message_shows_its_beginning(
    page: Page, demo_server: Served, api: httpx.AsyncClient
) -> None:
    said = ["\n".join(f"Line {number}" for number in range(count)) for count in (12, 40)]
    conversation = await make_conversation(api, [("user", text) for text in said])
    await open_page(page, f"{demo_server.base_url}/#{conversation}")
    short, long = page.locator(".bubble").first, page.locator(".bubble").last
    await expect(short).to_have_text(said[0], use_inner_text=True)
    more = long.get_by_role("button", name="Show all")
    lines = """node => Math.round(node.querySelector(".bubble-text").clientHeight
      / parseFloat(getComputedStyle(node).lineHeight))"""
    assert await long.evaluate(lines) == 12
    await more.press("Enter")
    assert await long.evaluate(lines) == 40
    await long.get_by_role("button", name="Show less").press("Enter")
    assert await long.evaluate(lines) == 12
    await page.locator("#composer-text").press("ArrowUp")
    editor = page.get_by_role("textbox", name="Edit your message")
    await expect(editor).to_have_value(said[1])


@pytest.mark.exhaustive
async def test_titles_and_messages_cut_no_character_in_halves(
    page: Page, demo_server: Served
) -> None:
    await open_page(page, demo_server.base_url, max_output_tokens=5)
    text = "a" * 79 + "😀 hello"
    await ask(page, text)
    title = page.locator("#conversations a[aria-current]")
    await expect(title).to_have_text(text[:80])
    await page.evaluate(f"({_WRITE})('half a pair: \\ud83d')")
    await page.keyboard.press("Enter")
    await finished(page.locator(".turn").nth(1))
    await page.reload()
    await expect(page.locator(".bubble").last).to_have_text("half a pair: \ufffd")


@pytest.mark.exhaustive
async def test_a_conversation_that_cannot_be_begun(page: Page, demo_server: Served) -> None:
    async def refuse(route: Route) -> None:
        body = json.dumps({"error": {"message": "The store is full.", "code": "full"}})
        if route.request.method == "POST":
            await route.fulfill(status=503, content_type="application/json", body=body)
        else:
            await route.continue_()

    await open_page(page, demo_server.base_url)
    await page.route("**/v1/conversations", refuse)
    await page.get_by_role("textbox", name="Your message").fill("Hello!")
    await page.keyboard.press("Enter")
    await expect(page.locator("#refusal")).to_have_text("The store is full.")
    await expect(page.locator("#refusal")).to_be_visible()
    await expect(page.locator("#composer-text")).to_have_value("Hello!")
    await page.unroute("**/v1/conversations")
    await page.keyboard.press("Enter")
    assert await finished(page.locator(".turn"))
    await expect(page.locator("#refusal")).to_be_hidden()


@pytest.mark.exhaustive
async def test_what_was_not_deleted_or_renamed_stays(
    page: Page, demo_server: Served, api: httpx.AsyncClient
) -> None:
    conversation = await make_conversation(api, [("user", "Keep me.")], title="Kept one")
    await open_page(page, f"{demo_server.base_url}/#{conversation}")
    await expect(page.locator(".bubble")).to_have_text("Keep me.")
    await page.route(f"**/v1/conversations/{conversation}", lambda route: route.abort())
    dialog, row = page.get_by_role("dialog"), row_of(page, conversation)
    for name, answer in (("Delete", "was not deleted"), ("Rename", "was not renamed")):
        await choose(row, name)
        if name == "Delete":
            await expect(row).to_have_count(0)
            await page.get_by_role("button", name="Delete now").click()
        else:
            await page.locator("#rename-input").fill("Another")
            await page.keyboard.press("Enter")
        await expect(dialog).to_contain_text(answer)
        await expect(dialog).to_contain_text("the server cannot be reached")
        await page.keyboard.press("Enter")
        await expect(dialog).to_be_hidden()
        await expect(row).to_be_visible()
    await expect(row.get_by_role("button")).to_be_focused()
    await row.get_by_role("link").click()
    await expect(page.locator(".bubble")).to_have_text("Keep me.")
    await expect(page.get_by_role("link", name="Kept one")).to_be_visible()


async def test_to_delete_a_conversation_is_to_stop_its_answer(
    page: Page, demo_server: Served, api: httpx.AsyncClient
) -> None:
    await stories(page)
    await open_page(page, demo_server.base_url)
    story = await say(page, STORY)
    await growing(story)
    tree = (await api.get(f"conversations/{page.url.partition('#')[2]}/tree")).json()
    await choose(page.locator("#conversations li").first, "Delete")
    await expect(page.locator(".turn")).to_have_count(0)
    async with page.expect_response(lambda one: one.request.method == "DELETE"):
        await page.get_by_role("button", name="Delete now").click()
    log = await api.get(f"responses/{tree['running']}?stream=true")
    assert (log.status_code, log.json()["error"]["code"]) == (404, "response_expired")
    metrics = f"{demo_server.base_url}/metrics"
    async with asyncio.timeout(60):
        while not re.search(r"num_requests_running\S* 0\.0", (await api.get(metrics)).text):  # noqa: ASYNC110
            await asyncio.sleep(0.1)


@pytest.mark.exhaustive
async def test_settings_out_of_range(page: Page, demo_server: Served) -> None:
    await open_page(page, demo_server.base_url, max_output_tokens=-5, top_p="x", temperature=0)
    await page.get_by_role("button", name="Settings").click()
    dialog = page.locator("#settings-dialog")
    await expect(page.get_by_label("Max tokens")).to_have_value("")
    await expect(page.get_by_label("Temperature")).to_have_value("0")
    await page.get_by_label("Temperature").fill("5")
    await page.get_by_role("button", name="Done").click()
    await expect(dialog).to_be_visible()  # and the browser says why
    await expect(page.get_by_label("Temperature")).to_be_focused()
    await page.get_by_label("Temperature").fill("0.33")
    await page.get_by_label("Max tokens").fill("12")
    await page.get_by_role("button", name="Done").click()
    await expect(dialog).to_be_hidden()
    assert await ask(page, "Hello! Who are you?")


@pytest.mark.exhaustive
async def test_settings_that_are_none(page: Page, demo_server: Served) -> None:
    await page.goto(demo_server.base_url)
    for kept in ("null", "5", '["x"]', '{"temperature": {}}', "{"):
        await page.evaluate(f"localStorage['penstock.settings'] = {json.dumps(kept)}")
        await page.reload()
        await connected(page)


def row_of(page: Page, conversation: str) -> Locator:
    """Its row in the list."""
    link = page.locator(f"a[data-id={conversation}]")
    return page.locator("#conversations li", has=link)


async def listed(page: Page) -> list[str]:
    """The conversations in the list, from its top."""
    ids: list[str] = await page.locator("#conversations a").evaluate_all(
        "nodes => nodes.map(node => node.dataset.id)"
    )
    return ids


@pytest.mark.exhaustive
async def test_focus_after_deleting(
    page: Page, demo_server: Served, api: httpx.AsyncClient
) -> None:
    """By keyboard alone: it stays in the list, beside what was deleted, or on what is back."""
    made = [
        await make_conversation(api, [("user", "Hello")], title=f"Made for number {number}")
        for number in range(2)
    ]
    await open_page(page, demo_server.base_url)
    for conversation in made:
        await expect(row_of(page, conversation)).to_be_visible()
    # Of those that are made in one second, any may be the first.
    ids = await listed(page)
    deleted = min(made, key=ids.index)
    row, neighbour = [row_of(page, ids[ids.index(deleted) + by]) for by in (0, 1)]
    await choose(row, "Delete")
    await expect(row).to_have_count(0)
    await expect(neighbour.get_by_role("link")).to_be_focused()
    await page.get_by_role("button", name="Undo").press("Enter")
    await expect(row).to_be_visible()
    other = await make_conversation(api, [("user", "Hello")], title="Made meanwhile")
    await row.get_by_role("link").focus()
    await page.evaluate("new BroadcastChannel('penstock').postMessage({})")  # as another tab
    await expect(row_of(page, other)).to_be_attached()
    await expect(row.get_by_role("link")).to_be_focused()
    await page.keyboard.press("ArrowDown")
    await expect(neighbour.get_by_role("link")).to_be_focused()
    await choose(neighbour, "Rename")
    await page.locator("#rename-input").fill("Renamed one")
    await page.keyboard.press("Enter")
    renamed = neighbour.get_by_role("button", name="More for “Renamed one”")
    await expect(renamed).to_be_focused()
