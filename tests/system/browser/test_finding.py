"""Finding conversations again: by day, pins and search; and what can be done with one."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.async_api import Page, Route, expect

from ..processes import Served
from .conftest import make_conversation
from .page_flow import choose, connected, conversation_of, open_page

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="session")]


async def test_the_list_is_by_day_and_pins_are_above(
    page: Page, demo_server: Served, api: httpx.AsyncClient
) -> None:
    conversation = await make_conversation(api, [("user", "Hello")], title="To be pinned")
    now = datetime.datetime.now().astimezone()
    ages = {"Today": 0, "Yesterday": 1, "Last 7 days": 3, "Last 30 days": 20, "older": 400}
    day = now.replace(hour=0, minute=0, second=1)
    made = [
        {
            "id": f"conv_{age}",
            "created_at": 1_500_000_000,
            "used_at": int((day - datetime.timedelta(days=age)).timestamp()),
            "metadata": {"title": title},
        }
        for title, age in ages.items()
    ]

    async def add(route: Route) -> None:
        listed = await (await route.fetch()).json()
        if "pinned" not in route.request.url:
            listed["data"] = [one for one in listed["data"] if one["id"] == conversation] + made
        await route.fulfill(json={**listed, "has_more": False})

    await page.route("**/v1/conversations?*", add)
    await open_page(page, demo_server.base_url)
    older = (now - datetime.timedelta(days=400)).strftime("%B %Y")
    days = page.locator("#conversations section")
    await expect(days.locator(".day")).to_have_text([*list(ages)[:4], older])
    row = page.locator(f"[data-row={conversation}]")
    await choose(row, "Pin")
    await expect(days.first.locator(".day")).to_have_text("Pinned")
    await expect(days.first.locator("li")).to_have_text(["To be pinned"])
    await expect(row).to_have_count(1)
    await expect(row.get_by_role("button")).to_be_focused()  # where it is now
    # The list is one stop of the Tab key.
    await page.keyboard.press("Tab")
    await expect(page.get_by_role("link", name="Dashboard")).to_be_focused()
    await choose(row, "Unpin")
    await expect(days.first.locator(".day")).to_have_text("Today")


async def test_all_conversations_are_searched(
    page: Page, demo_server: Served, api: httpx.AsyncClient
) -> None:
    """By words of titles and messages; what is found is opened where it is."""
    said = [("user", "A word: Xylophone."), *[("assistant", f"Line {n}.\n" * 9) for n in range(60)]]
    conversation = await make_conversation(api, said, title="About <b>instruments</b>")
    other = await make_conversation(api, [("user", "Hello")], title="My xylophones")
    await open_page(page, f"{demo_server.base_url}/#{other}")
    await page.keyboard.press("Control+k")
    box, found = page.get_by_role("searchbox"), page.locator("#found li")
    await expect(box).to_be_focused()
    await page.keyboard.type("xylo")
    await expect(found).to_have_count(2)
    in_text, in_title = found.filter(has_text="instruments"), found.filter(has_text="My")
    await expect(in_text.locator("mark")).to_have_text(["Xylophone"])
    await expect(in_text.locator("b")).to_have_text("About <b>instruments</b>")
    await expect(in_title.locator("mark")).to_have_text(["xylophones"])
    await page.keyboard.press("ArrowDown")
    await expect(found.first.get_by_role("link")).to_be_focused()
    await in_text.get_by_role("link").press("Enter")
    bubble = page.locator(".bubble").first
    await expect(bubble).to_contain_text("Xylophone")
    await expect(page.locator(".turn").first).to_be_in_viewport()
    assert page.url.endswith(conversation)
    await box.fill("xylo nowhere")
    await expect(page.get_by_text("Nothing was found.")).to_be_visible()
    await box.press("Escape")
    await expect(box).to_have_value("")
    await expect(page.locator("#conversations")).to_be_visible()


@pytest.mark.exhaustive
async def test_a_deletion_is_taken_back(
    page: Page, demo_server: Served, api: httpx.AsyncClient
) -> None:
    """The server deletes when that cannot be any more; then the list is as it was."""
    made = [
        await make_conversation(api, [("user", f"Of {name}")], title=f"Deleted {name}")
        for name in "AB"
    ]
    await open_page(page, f"{demo_server.base_url}/#{made[0]}")
    await expect(page.locator(".bubble")).to_have_text("Of A")
    rows = [page.locator(f"[data-row={one}]") for one in made]
    await choose(rows[0], "Delete")
    await expect(page.locator("#welcome")).to_be_visible()
    await page.get_by_role("button", name="Undo").click()
    await expect(page.locator(".bubble")).to_have_text("Of A")
    await expect(rows[0]).to_be_visible()
    assert (await api.get(f"conversations/{made[0]}")).status_code == 200
    await choose(rows[0], "Delete")
    async with page.expect_response(f"**/{made[0]}"):  # the one before is deleted for good
        await choose(rows[1], "Delete")
    assert (await api.get(f"conversations/{made[0]}")).status_code == 404
    await page.reload()
    await connected(page)
    loaded = page.get_by_text("Your conversations appear here.")
    await expect(loaded.or_(page.locator("#conversations li").first)).to_be_visible()
    for row in rows:
        await expect(row).to_have_count(0)


@pytest.mark.exhaustive
async def test_the_model_is_asked_for_a_title(
    page: Page, demo_server: Served, api: httpx.AsyncClient
) -> None:
    """Only where the reader wants it; what it says is not kept as a turn."""
    said = [("user", "My name is Ada."), ("assistant", "Hello, Ada!")]
    conversation = await make_conversation(api, said, title="Before")
    await open_page(page, demo_server.base_url)
    await choose(page.locator(f"[data-row={conversation}]"), "Rename")
    asks = page.get_by_role("button", name="Ask the model")
    await expect(asks).to_be_visible()  # the dialog's module is loaded when it first opens
    await page.context.set_offline(True)
    await asks.click()
    await expect(page.get_by_text("The model has not given one.")).to_be_visible()
    await page.context.set_offline(False)
    await asks.click()
    field = page.locator("#rename-input")
    await expect(field).not_to_have_value("Before")
    title = await field.input_value()
    assert 0 < len(title) <= 80
    assert "\n" not in title
    await page.get_by_role("button", name="Rename", exact=True).click()
    await expect(page.locator(f"a[data-id={conversation}]")).to_have_text(title)
    assert len((await api.get(f"conversations/{conversation}/tree")).json()["data"]) == 1
    titles = await page.evaluate(
        """async (texts) => {
          const { titleSaid } = await import("./turns.js");
          return texts.map(titleSaid);
        }""",
        ["```python\n# **Adding numbers.**\n```", '\n"A title"\nand more', "```\n---"],
    )
    assert titles == ["Adding numbers", "A title", ""]


@pytest.mark.exhaustive
async def test_the_sidebar_stays_as_it_was_left(page: Page, demo_server: Served) -> None:
    await open_page(page, demo_server.base_url)
    for is_open in (False, True):
        await page.keyboard.press("Alt+l")
        await page.reload()
        await connected(page)
        await expect(page.locator("#sidebar")).to_be_visible(visible=is_open)


@pytest.mark.exhaustive
async def test_a_conversation_is_saved_as_a_file(
    page: Page, demo_server: Served, api: httpx.AsyncClient, tmp_path: Path
) -> None:
    said = [("user", "Hello"), ("assistant", "**Hi**\n\n```\nx\n```")]
    conversation = await make_conversation(api, said, title="A / file")
    await open_page(page, demo_server.base_url)
    saved = {}
    for format_, ending in (("Markdown", "md"), ("JSON", "json")):
        async with page.expect_download() as download:
            await choose(page.locator(f"[data-row={conversation}]"), f"Save as {format_}")
        file = await download.value
        assert file.suggested_filename == f"A-file.{ending}"
        await file.save_as(tmp_path / ending)
        saved[ending] = (tmp_path / ending).read_text("utf-8")
    expected = "# A / file\n\n## You\n\nHello\n\n## Assistant\n\n**Hi**\n\n```\nx\n```\n"
    assert saved["md"] == expected
    [kept] = json.loads(saved["json"])["conversations"]
    tree = (await api.get(f"conversations/{conversation}/tree?items=all")).json()
    assert (kept["head"], kept["turns"]) == (tree["head"], tree["data"])


@pytest.mark.exhaustive
async def test_all_chats_are_saved_and_loaded(
    page: Page, demo_server: Served, api: httpx.AsyncClient, tmp_path: Path
) -> None:
    """A tree with branches, its head between them; other files are refused."""
    title = "To be loaded again"
    conversation = await make_conversation(api, [("user", "A"), ("assistant", "B")], title=title)
    one = f"conversations/{conversation}"
    made = [(await api.get(f"{one}/tree")).json()["head"]]
    for question, parent in (("left", 0), ("right", 0), ("below right", 2), ("below left", 1)):
        head = {"turn": made[parent], "expected": made[-1]}
        (await api.post(f"{one}/head", json=head)).raise_for_status()
        body = {"model": "demo", "input": question, "conversation": conversation}
        made.append(
            (await api.post("responses", json=body | {"max_output_tokens": 5})).json()["id"]
        )
    tree = (await api.get(f"{one}/tree?items=all")).json()
    head = tree["data"][2]["turn"]
    await api.post(f"{one}/head", json={"turn": head, "expected": tree["head"]})
    await api.post(one, json={"pinned": True})
    await open_page(page, demo_server.base_url)
    await page.get_by_role("button", name="Settings").click()
    async with page.expect_download() as download:
        await page.get_by_role("button", name="Save all as a file").click()
    await (await download.value).save_as(tmp_path / "all.json")
    saved = json.loads((tmp_path / "all.json").read_text("utf-8"))
    saved["conversations"] = [each for each in saved["conversations"] if each["id"] == conversation]
    note = page.locator("#chats-note")
    for text, said in (
        ("{", "not JSON"),
        ("{}", "no conversations"),
        (json.dumps(saved), "One chat was loaded."),
    ):
        await page.locator("#chats-file").set_input_files(
            {"name": "a.json", "mimeType": "application/json", "buffer": text.encode()}
        )
        await expect(note).to_contain_text(said)
    await page.get_by_role("button", name="Done").click()
    await expect(page.locator("#conversations section").first.locator("li")).to_have_count(2)
    listed = (await api.get("conversations?pinned=true")).json()["data"]
    [new] = [each["id"] for each in listed if each["id"] != conversation]
    again = (await api.get(f"conversations/{new}/tree?items=all")).json()

    def shape(found: dict[str, Any], head: str) -> tuple[list[tuple[int, list[str]]], int]:
        ids = [None, *(turn["turn"] for turn in found["data"])]
        turns = []
        for turn in found["data"]:
            output = turn["output"] or []
            said = [*turn["items"], *(output if isinstance(output, list) else [output])]
            texts = [part["text"] for item in said for part in item.get("content") or []]
            turns.append((ids.index(turn["parent"]), texts))
        return turns, ids.index(head)

    assert shape(again, again["head"]) == shape(tree, head)
    await choose(page.locator(f"[data-row={conversation}]"), "Duplicate")
    await expect(page.locator("#chat-title")).to_have_text(f"Copy of {title}")
    assert conversation_of(page) not in (conversation, new)
    again = (await api.get(f"conversations/{conversation_of(page)}/tree?items=all")).json()
    assert shape(again, again["head"]) == shape(tree, head)
