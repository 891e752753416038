"""The chat page in a real browser: what a reader sees and does, and what goes wrong around it.

`PENSTOCK_TEST_URL` adds a run of the main flow against the server at that address.
"""

import os
import re
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, async_playwright, expect

from .page_flow import (
    CHROMIUM_ARGS,
    ask,
    finished,
    main_flow,
    open_page,
    say,
)
from .stub_server import HTML, StubServer

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

REAL_SERVER = os.environ.get("PENSTOCK_TEST_URL")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser(chromium_path: str) -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        started = await playwright.chromium.launch(
            executable_path=chromium_path, headless=True, args=CHROMIUM_ARGS
        )
        yield started
        await started.close()


@pytest_asyncio.fixture(loop_scope="module")
async def page(browser: Browser) -> AsyncIterator[Page]:
    """A fresh page; no script error, policy violation or request to elsewhere may happen in it."""
    context = await browser.new_context(viewport={"width": 1000, "height": 640})
    context.set_default_timeout(8_000)
    opened = await context.new_page()
    wrong: list[str] = []
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on("console", lambda note: "Policy" in note.text and wrong.append(note.text))
    opened.on(
        "request", lambda request: wrong.append(request.url) if is_foreign(request.url) else 0
    )
    yield opened
    await context.close()
    assert wrong == []


def is_foreign(url: str) -> bool:
    return not url.startswith(
        ("http://127.0.0.1", "http://localhost", "data:", REAL_SERVER or "data:")
    )


async def test_main_flow(page: Page, stub: StubServer) -> None:
    await main_flow(page, stub.base_url, long_request="slow story")
    creates = [message for message in stub.received if message["type"] == "response.create"]
    assert [message.get("previous_response_id") for message in creates] == [
        None, "resp_1", "resp_2", "resp_3", None,
    ]  # fmt: skip
    assert [m["response_id"] for m in stub.received if m["type"] == "penstock.cancel"] == ["resp_3"]


if REAL_SERVER:

    async def test_main_flow_on_a_real_server(page: Page) -> None:
        await main_flow(page, REAL_SERVER, long_request="Tell me a long story.")


async def test_markup_in_messages_is_text(page: Page, stub: StubServer) -> None:
    await open_page(page, stub.base_url)
    assert await ask(page, "html " + HTML) == HTML
    assert await page.locator(".bubble").inner_text() == "html " + HTML
    await ask(page, "refuse")
    await expect(page.locator(".note.is-error")).to_contain_text("<b>Come back</b>")
    assert await page.title() == "penstock"
    assert await page.locator(".transcript :is(script, img, a, .note b)").count() == 0


async def test_markdown(page: Page, stub: StubServer) -> None:
    await open_page(page, stub.base_url)
    await ask(page, "markdown")
    prose = page.locator(".prose")
    assert await prose.locator("> p > strong").inner_text() == "bold"
    assert await prose.locator("> p > em").inner_text() == "italic"
    assert await prose.locator("> p > code").inner_text() == "code"
    assert await prose.locator("> ol > li").count() == 2
    assert await prose.locator("> ol > li > ul > li").inner_text() == "nested"
    assert (
        await prose.locator("> pre[data-language=python]").inner_text() == "print('<b>')\n\nx = 1"
    )
    assert await prose.locator("> p").last.inner_text() == "[x](javascript:alert(1))"


async def test_markdown_piece_by_piece_equals_markdown_at_once(
    page: Page, stub: StubServer
) -> None:
    await open_page(page, stub.base_url)
    different = await page.evaluate(
        r"""async () => {
          const { MarkdownStream } = await import("./markdown.js");
          const texts = [
            "a **b *c* d** `e`\n\n\n# head\ntext\n- x\n  - y\n    z\n- w\n\n3. q\n4. r\n\nend",
            "```js\nlet a;\n\n- no list\n```\nafter\n~~~\nopen\n\n# no head", "****",
            "1. a\n\n2. b\n\n\n", "- a\n\n2", "* star *\n*a*b*c* _d_ e_f_g __ `` ` ``` x",
            "\n\n<i>&amp;</i>\n\n- \n- b\n", "Zoë 👋🏽 *日本*\n",
          ];
          const render = (pieces) => {
            const root = document.createElement("div");
            const stream = new MarkdownStream(root);
            pieces.forEach((piece) => stream.append(piece));
            return root.innerHTML;
          };
          return texts.flatMap((text) => [1, 2, 3, 7].map((size) => {
            const pieces = text.match(new RegExp(`[^]{1,${size}}`, "g"));
            const [whole, split] = [render([text]), render(pieces)];
            return whole === split ? null : [size, whole, split];
          })).filter(Boolean);
        }"""
    )
    assert different == []


async def test_deltas_are_shown_once_per_frame(page: Page, stub: StubServer) -> None:
    await open_page(page, stub.base_url)
    await page.evaluate(
        """() => {
          window.numChanges = 0;
          new MutationObserver(() => { window.numChanges += 1; }).observe(
            document.querySelector("#transcript"),
            { subtree: true, characterData: true, childList: true },
          );
        }"""
    )
    answer = await say(page, "burst")
    await finished(answer)
    num_tokens = int(await answer.locator(".stats .figure:last-child b").inner_text())
    num_changes = await page.evaluate("window.numChanges")
    assert num_tokens > 1_000
    assert num_changes < num_tokens / 2
    assert (await answer.locator(".prose").inner_text()).endswith("w999")


@pytest.mark.parametrize(
    ("message", "note"),
    [
        ("fail", "The engine went away."),
        ("length", "reached its length limit"),
        ("refuse", "The queue is full."),
    ],
)
async def test_an_answer_that_ends_badly_says_so(
    page: Page, stub: StubServer, message: str, note: str
) -> None:
    await open_page(page, stub.base_url)
    answer = await say(page, message)
    text = await finished(answer)
    assert text == ("" if message == "refuse" else "You said:")
    await expect(answer.locator(".note")).to_contain_text(note)
    await expect(page.locator("#announcer")).to_contain_text(note)
    again = page.get_by_role("button", name="Try again")
    if message != "length":
        await again.click()
        await expect(page.locator(".message.user")).to_have_count(1)
        await finished(page.locator(".message.assistant"))
        assert len(stub.received) == 2
    assert await ask(page, "hi") == "You said: hi"
    await expect(again).to_have_count(0)


async def test_a_pause_is_told_and_taken_back(page: Page, stub: StubServer) -> None:
    await open_page(page, stub.base_url)
    answer = await say(page, "pause please")
    await expect(answer.locator(".stats")).to_contain_text("Paused")
    assert await finished(answer) == "You said: pause please"
    await expect(answer.locator(".stats")).not_to_contain_text("Paused")


async def test_a_dropped_connection_keeps_the_text_and_reconnects(
    page: Page, stub: StubServer
) -> None:
    await open_page(page, stub.base_url)
    await ask(page, "My name is Ada.")
    stub.is_down = True
    answer = await say(page, "drop now")
    assert await finished(answer) == "Half of an"
    await expect(page.get_by_role("alert")).to_contain_text("connection to the server broke")
    again = page.get_by_role("button", name="Ask again")
    await expect(again).to_be_disabled()
    await page.get_by_role("textbox").fill("kept while offline")
    await expect(page.get_by_role("button", name="Send")).to_be_disabled()

    stub.is_down = False
    await page.get_by_role("button", name="Try now").click()
    await expect(page.locator("#connection")).to_have_attribute("data-state", "open")
    await expect(page.get_by_role("alert")).to_be_hidden()
    await expect(page.get_by_role("textbox")).to_have_value("kept while offline")
    await expect(again).to_be_enabled()
    assert "Ada" in await ask(page, "What is my name?")


@pytest.mark.parametrize(
    ("message", "note"),
    [("second", "no longer has this conversation"), ("full up", "filled the model's context")],
)
async def test_a_conversation_that_cannot_go_on_is_started_anew(
    page: Page, stub: StubServer, message: str, note: str
) -> None:
    await open_page(page, stub.base_url)
    await ask(page, "first")
    if message == "second":
        stub.forget()
    await finished(await say(page, message))
    await expect(page.locator(".note.is-error")).to_contain_text(note)
    await page.get_by_role("button", name="Start anew").click()
    await expect(page.locator(".message.user")).to_have_count(1)
    assert await finished(page.locator(".message.assistant")) == f"You said: {message}"


async def test_a_server_that_is_not_there_yet(page: Page, stub: StubServer) -> None:
    stub.is_down = True
    await page.goto(stub.base_url)
    await expect(page.get_by_role("alert")).to_contain_text("Cannot reach the server")
    stub.is_down = False
    await expect(page.locator("#connection")).to_have_attribute("data-state", "open")
    assert await ask(page, "hi") == "You said: hi"


async def test_api_key(page: Page, keyed_stub: StubServer) -> None:
    await page.goto(keyed_stub.base_url)
    key = page.get_by_label("API key", exact=True)
    for wrong, message in (("no good", "cannot send this key"), ("sk-wrong", "did not accept")):
        await key.fill(wrong)
        await page.keyboard.press("Enter")
        await expect(page.locator("#key-error")).to_contain_text(message)
    await page.get_by_role("button", name="Not now").click()
    await page.get_by_role("button", name="Enter key").click()
    await key.fill("sk-right")
    await page.get_by_role("button", name="Connect").click()
    await expect(page.get_by_role("dialog")).to_be_hidden()
    assert await ask(page, "hi") == "You said: hi"
    await page.reload()
    assert await ask(page, "again") == "You said: again"
    assert await page.evaluate("[localStorage.length, document.cookie]") == [0, ""]


async def test_keyboard(page: Page, stub: StubServer) -> None:
    await open_page(page, stub.base_url)
    await page.keyboard.type("slow one")  # the message box has the focus from the start
    await page.keyboard.press("Shift+Enter")
    await page.keyboard.type("two")
    await page.keyboard.press("Enter")
    await expect(page.locator(".bubble")).to_have_text("slow one\ntwo")
    await page.keyboard.type("meanwhile")
    await page.keyboard.press("Enter")  # not sent while an answer comes, and not lost
    await expect(page.get_by_role("textbox")).to_have_value("meanwhile")
    await page.keyboard.press("Escape")
    await expect(page.locator(".message.assistant")).to_contain_text("Stopped.")
    assert len(stub.received) == 2
    await page.keyboard.press("Enter")
    assert await finished(page.locator(".message.assistant").last) == "You said: meanwhile"
    await expect(page.locator("#announcer")).to_have_text("You said: meanwhile")
    await page.keyboard.press("Shift+Tab")
    await page.keyboard.press("Shift+Tab")
    await expect(page.get_by_role("button", name="New chat")).to_be_focused()
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("textbox")).to_be_focused()


async def test_scrolling_follows_until_the_reader_scrolls_up(page: Page, stub: StubServer) -> None:
    await open_page(page, stub.base_url)
    distance = """(() => {
      const { scrollHeight, clientHeight, scrollTop } = document.querySelector("#scroller");
      return scrollHeight - clientHeight - scrollTop;
    })()"""
    answer = await say(page, "long")
    await expect(answer).to_contain_text("Paragraph 12.")
    assert await page.evaluate(distance) < 40
    await page.mouse.move(400, 300)
    await page.mouse.wheel(0, -300)
    latest = page.get_by_role("button", name="Latest")
    await expect(latest).to_be_visible()
    await finished(answer)
    assert await page.evaluate(distance) > 250
    await latest.click()
    await expect(latest).to_be_hidden()
    assert await page.evaluate(distance) < 2


async def test_narrow_dark_and_roles(page: Page, stub: StubServer) -> None:
    await page.set_viewport_size({"width": 320, "height": 640})
    await page.emulate_media(color_scheme="dark", reduced_motion="reduce")
    await open_page(page, stub.base_url)
    await ask(page, "markdown")
    await ask(page, "x" * 400)
    assert await page.evaluate("document.documentElement.scrollWidth <= 320")
    assert await page.evaluate("document.querySelector('main').scrollWidth <= 320")
    background = await page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert max(map(int, re.findall(r"\d+", background))) < 60
    await expect(page.get_by_role("log", name="Messages")).to_be_visible()
    await expect(page.get_by_role("main")).to_be_visible()
    await expect(page.get_by_role("heading", name="penstock", level=1)).to_be_visible()
