"""Changing what was said: answers are edited, messages deleted; and what code of HTML makes."""

from __future__ import annotations

import httpx
import pytest
from playwright.async_api import Browser, Page, expect

from ..processes import Served
from .conftest import make_conversation, violations
from .page_flow import ask, connected, conversation_of, finished, open_page, say

pytestmark = [
    pytest.mark.browser,
    pytest.mark.exhaustive,
    pytest.mark.asyncio(loop_scope="session"),
]


async def texts_of(api: httpx.AsyncClient, conversation: str) -> list[list[str]]:
    """What is said in each turn of the shown branch, as the server has it."""
    tree = (await api.get(f"conversations/{conversation}/tree?items=true")).json()
    shown = [turn for turn in tree["data"] if "items" in turn]
    answers = [turn["output"] or [] for turn in shown]
    said = [
        [*turn["items"], *(answer if isinstance(answer, list) else [answer])]
        for turn, answer in zip(shown, answers, strict=True)
    ]
    return [[item["content"][-1]["text"] for item in items] for items in said]


@pytest.mark.external
@pytest.mark.node
async def test_an_answer_is_edited(
    page: Page, demo_server: Served, api: httpx.AsyncClient, axe: str
) -> None:
    """Its new text is a version beside the old one, and what the model gets to see."""
    await open_page(page, demo_server.base_url, temperature=0, max_output_tokens=12)
    original = await ask(page, "Hello!")
    await ask(page, "Who are you?")
    first = page.locator(".turn").first
    await first.get_by_role("button", name="Edit answer").click()
    editor = page.get_by_role("textbox", name="Edit the answer")
    await expect(editor).to_be_focused()
    assert (await editor.input_value()).split() == original.split()
    assert await violations(page, axe) == []
    await page.keyboard.press("Escape")
    await expect(first.get_by_role("button", name="Edit answer")).to_be_focused()
    await expect(editor).to_have_count(0)
    await first.get_by_role("button", name="Edit answer").click()
    await editor.fill("I am **Orlan**.\n\n- a miller")
    await page.keyboard.press("Enter")  # a new line: answers have several
    await page.keyboard.press("Control+Enter")
    await expect(page.locator(".turn")).to_have_count(1)  # what followed is in the other version
    for _ in range(2):
        await expect(first.locator(".assistant .prose strong")).to_have_text("Orlan")
        await expect(first.locator(".assistant .place")).to_have_text("2/2")
        await page.reload()
        await connected(page)
    conversation = conversation_of(page)
    edited = ["Hello!", "I am **Orlan**.\n\n- a miller\n"]
    assert await texts_of(api, conversation) == [edited]
    await ask(page, "And who are you now?")
    [kept, _] = await texts_of(api, conversation)
    assert kept == edited
    await first.get_by_role("button", name="Versions beside each other").click()
    versions = page.get_by_role("dialog").locator(".version")
    await expect(versions).to_have_count(2)
    assert (await versions.first.locator(".prose").inner_text()).split() == original.split()
    await expect(versions.last.locator(".prose strong")).to_have_text("Orlan")
    await page.keyboard.press("Escape")
    await first.get_by_role("button", name="Previous version").click()
    await expect(page.locator(".bubble")).to_have_text(["Hello!", "Who are you?"])
    assert (await finished(first)).split() == original.split()
    # An edited answer is answered again as any other.
    await first.get_by_role("button", name="Next version").click()
    await expect(first.locator(".prose strong")).to_have_text("Orlan")
    await first.get_by_role("button", name="Regenerate").click()
    await expect(first.locator(".place")).to_have_text("3/3")
    assert (await finished(page.locator(".turn").first)).split() == original.split()


@pytest.mark.external
@pytest.mark.node
async def test_messages_and_answers_are_deleted(
    page: Page, demo_server: Served, api: httpx.AsyncClient, axe: str
) -> None:
    """One is gone for good, and the rest stays; not before the reader has said so twice."""
    await open_page(page, demo_server.base_url, temperature=0, max_output_tokens=8)
    for text in ("First", "Second", "Third"):
        await ask(page, text)
    conversation = conversation_of(page)
    before = await texts_of(api, conversation)
    second = page.locator(".turn").nth(1)
    await second.hover()
    delete = second.get_by_role("button", name="Delete", exact=True).first
    await delete.click()
    sure = second.get_by_role("group", name="Delete this message and its answer for good?")
    await expect(sure.get_by_role("button", name="Delete")).to_be_focused()
    assert await violations(page, axe) == []
    await page.keyboard.press("Escape")
    await expect(sure).to_have_count(0)
    await expect(delete).to_be_focused()
    assert await texts_of(api, conversation) == before
    await page.keyboard.press("Enter")
    await sure.get_by_role("button", name="Delete").click()
    bubbles = page.locator(".bubble")
    for _ in range(2):
        await expect(bubbles).to_have_text(["First", "Third"])
        await expect(page.locator(".place")).to_have_count(0)
        assert await texts_of(api, conversation) == [before[0], before[2]]
        await page.reload()
        await connected(page)
    # An answer alone: its message may be answered again.
    last = page.locator(".turn").last
    await last.get_by_role("button", name="Delete answer").click()
    await last.get_by_role("group").get_by_role("button", name="Delete").click()
    note = last.get_by_text("There is no answer to this.")
    await expect(note).to_be_visible()
    assert await texts_of(api, conversation) == [before[0], ["Third"]]
    await page.reload()
    await connected(page)
    await expect(last.get_by_role("button", name="Copy answer")).to_be_hidden()
    await last.get_by_role("button", name="Answer it").click()
    await expect(note).to_have_count(0)
    assert (await finished(page.locator(".turn").last)).strip()
    assert len(await texts_of(api, conversation)) == 2
    for text in ("Third", "First"):
        turn = page.locator(".turn", has_text=text)
        await turn.hover()
        await turn.get_by_role("button", name="Delete", exact=True).first.click()
        await turn.get_by_role("group").get_by_role("button", name="Delete").click()
        await expect(bubbles.filter(has_text=text)).to_have_count(0)
    await expect(page.locator("#welcome")).to_be_visible()
    assert await texts_of(api, conversation) == []
    assert (await ask(page, "A new beginning")).strip()
    assert conversation_of(page) == conversation


_HOSTILE = """```html
<!doctype html><style>h1 { color: rgb(1, 2, 3) }</style><h1>Shown</h1>
<p id="log"></p><img src="ELSEWHERE/favicon.svg"><a href="ELSEWHERE/live">Leave</a>
<script>
  const tries = {
    storage: () => localStorage.length, cookie: () => document.cookie,
    parent: () => parent.document.title, top: () => { top.location = "ELSEWHERE"; },
  };
  const log = Object.entries(tries).map(([name, attempt]) => {
    try { attempt(); return `${name}: done`; } catch (error) { return `${name}: ${error.name}`; }
  });
  const open = window.open("ELSEWHERE") ? "done" : "no";
  fetch("ELSEWHERE").then(() => "done", () => "no").then(async (fetched) => {
    const here = await fetch("/v1/models").then(() => "done", () => "no");
    document.querySelector("#log").textContent =
      [...log, `open: ${open}`, `fetch: ${fetched}`, `own: ${here}`].join(", ");
  });
</script>
```

```svg
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 10 10" width="40">
<circle r="4" cx="5" cy="5"/></svg>
```

```js
let x;
```
"""


@pytest.mark.external
@pytest.mark.node
async def test_code_of_html_is_shown_as_a_page(
    browser: Browser, demo_server: Served, api: httpx.AsyncClient, axe: str
) -> None:
    """It runs where it reaches nothing: no page of ours, no storage, no network, no other page."""
    elsewhere = demo_server.base_url.replace("127.0.0.1", "localhost")  # it would answer
    text = _HOSTILE.replace("ELSEWHERE", elsewhere)
    conversation = await make_conversation(api, [("user", "Hello"), ("assistant", text)])
    context = await browser.new_context()
    page = await context.new_page()
    answered: list[str] = []
    page.on("response", lambda response: answered.append(response.url))
    await open_page(page, f"{demo_server.base_url}/#{conversation}")
    shows = page.get_by_role("button", name="Show as a page")
    await expect(shows).to_have_count(2)
    await shows.first.click()
    dialog = page.get_by_role("dialog", name="Preview")
    frame = dialog.locator("iframe").content_frame
    await expect(frame.locator("h1")).to_have_css("color", "rgb(1, 2, 3)")
    await expect(frame.locator("#log")).to_have_text(
        "storage: SecurityError, cookie: SecurityError, parent: SecurityError, "
        "top: SecurityError, open: no, fetch: no, own: no"
    )
    async with page.expect_console_message(lambda note: "frame-src 'self'" in note.text):
        await frame.get_by_role("link", name="Leave").click()
    assert page.url.endswith(conversation)
    await dialog.get_by_role("button", name="Close").click()
    await expect(page.locator("iframe")).to_have_count(0)
    await shows.last.click()
    await expect(frame.locator("svg circle")).to_be_visible()
    assert await violations(page, axe) == []
    assert [url for url in answered if not url.startswith(demo_server.base_url)] == []
    await context.close()


async def test_how_messages_are_sent_and_shown(page: Page, demo_server: Served) -> None:
    """By Ctrl+Enter, and as Markdown, where the reader likes it so; in every conversation."""
    await open_page(page, demo_server.base_url, max_output_tokens=5)
    await page.get_by_role("button", name="Settings").click()
    await page.get_by_label("are sent with Ctrl+Enter").check()
    await page.get_by_label("are shown as Markdown").check()
    await page.get_by_role("button", name="Done").click()
    await expect(page.locator("#hint")).to_contain_text("Ctrl+Enter sends")
    box = page.get_by_role("textbox", name="Your message")
    await box.fill("Say **this**")
    await page.keyboard.press("Enter")
    await page.keyboard.type("- and that")
    await expect(box).to_have_value("Say **this**\n- and that")
    await page.keyboard.press("Control+Enter")
    turn = page.locator(".turn").first
    await finished(turn)
    for _ in range(2):
        await expect(turn.locator(".bubble strong")).to_have_text("this")
        await expect(turn.locator(".bubble li")).to_have_text("and that")
        await page.reload()
        await connected(page)
    await turn.hover()
    await turn.get_by_role("button", name="Edit", exact=True).click()
    editor = page.get_by_role("textbox", name="Edit your message")
    await expect(editor).to_have_value("Say **this**\n- and that")
    await page.keyboard.press("Enter")
    await expect(editor).to_be_focused()
    await page.keyboard.press("Control+Enter")
    await expect(turn.locator(".place")).to_have_text("2/2")
    await finished(page.locator(".turn").first)
    await page.get_by_role("button", name="New chat").click()
    await page.get_by_role("button", name="Settings").click()
    await page.get_by_role("button", name="Reset to defaults").click()
    await expect(page.get_by_label("are shown as Markdown")).to_be_checked()
    await page.get_by_label("are sent with Ctrl+Enter").uncheck()
    await page.get_by_role("button", name="Done").click()
    await finished(await say(page, "Hello!"))
