"""How the chat page looks and moves: smooth, still, light, and for everybody."""

from __future__ import annotations

import json
import re
import shutil

import httpx
import pytest
from playwright.async_api import Browser, Page, Route, expect

from ..processes import NUM_CONTEXT_TOKENS, Served
from .conftest import make_conversation, violations
from .page_flow import (
    CHROMIUM_ARGS,
    STORY,
    connected,
    finished,
    growing,
    open_page,
    say,
    stopped,
    stories,
)

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="session")]

_MAX_PAGE_BYTES = 200_000
_NUM_TOKENS = 300

# What moves, and how often, while an answer comes.
_WATCH = """() => {
  window.seen = { shifts: [], changes: 0, elsewhere: 0, frames: 0 };
  new PerformanceObserver((entries) => {
    for (const { value, hadRecentInput, sources } of entries.getEntries()) {
      if (hadRecentInput) continue;
      const moved = sources.map(({ node }) => node?.className ?? node?.nodeName);
      window.seen.shifts.push([value, moved]);
    }
  }).observe({ type: "layout-shift" });
  new MutationObserver((changes) => {
    window.seen.changes += 1;
    const last = [...document.querySelectorAll(".turn")].at(-1);
    for (const { target, addedNodes } of changes) {
      const isOfLast = last.contains(target) || [...addedNodes].includes(last);
      window.seen.elsewhere += isOfLast ? 0 : 1;
    }
  }).observe(
    document.querySelector("#transcript"),
    { subtree: true, characterData: true, childList: true },
  );
  const tick = () => {
    window.seen.frames += 1;
    requestAnimationFrame(tick);
  };
  requestAnimationFrame(tick);
}"""


@pytest.mark.exhaustive
async def test_a_first_visit_begins_at_the_heading(page: Page, demo_server: Served) -> None:
    """On small screens and, the same to a page, at 200 % zoom of larger ones."""
    await open_page(page, demo_server.base_url, max_output_tokens=5)
    heading = page.get_by_role("heading", name="What shall we talk about?")
    for width, height in ((360, 640), (360, 380), (640, 360), (500, 320)):
        await page.set_viewport_size({"width": width, "height": height})
        await page.goto(demo_server.base_url)
        await connected(page)
        # There is something to scroll.
        assert await page.evaluate("scroller.scrollHeight - scroller.clientHeight") > 24
        await expect(heading).to_be_in_viewport(ratio=1)
        await page.locator("#composer-text").fill("Hello")
        await page.evaluate("new Promise(requestAnimationFrame)")
        assert await page.evaluate("scroller.scrollTop") == 0
        await expect(page.get_by_role("button", name="Latest")).to_be_hidden()
        await page.keyboard.press("Enter")
        await finished(page.locator(".turn"))
        await page.keyboard.press("Alt+n")
        await expect(heading).to_be_in_viewport(ratio=1)
        assert await page.evaluate("scroller.scrollTop") == 0


_TOO_SMALL = """() => [...document.querySelectorAll(
    "button, select, textarea, .sidebar a, .choice")]
  .filter((node) => node.checkVisibility({ visibilityProperty: true }))
  .map((node) => [node.id || node.title || node.textContent, node.getBoundingClientRect()])
  .filter(([_, { width, height }]) => width < 40 || height < 40)
  .map(([name, { width, height }]) => `${name}: ${width} x ${height}`)"""


@pytest.mark.exhaustive
async def test_fingers_find_every_button(
    browser: Browser, demo_server: Served, api: httpx.AsyncClient
) -> None:
    text = "Hello\n\n```js\nlet x;\n```"
    said = [("user", "Hello!\n" * 30), ("assistant", text)]
    conversation = await make_conversation(api, said)
    context = await browser.new_context(
        viewport={"width": 390, "height": 700}, has_touch=True, is_mobile=True
    )
    page = await context.new_page()
    await open_page(page, demo_server.base_url, max_output_tokens=20)
    assert await page.evaluate(_TOO_SMALL) == []
    await page.evaluate(f"location.hash = '#{conversation}'")
    await expect(page.locator(".bubble-more")).to_be_visible()
    turn = await say(page, STORY)
    await finished(turn)
    await turn.get_by_role("button", name="Regenerate").click()
    await expect(turn.locator(".place")).to_have_text("2/2")
    await finished(turn)
    assert await page.evaluate(_TOO_SMALL) == []
    await turn.get_by_role("button", name="Edit", exact=True).click()
    assert await page.evaluate(_TOO_SMALL) == []
    await page.get_by_role("button", name="Conversations", exact=True).click()
    await page.locator("#conversations a").first.focus()
    assert await page.evaluate(_TOO_SMALL) == []
    await page.locator("#conversations li").first.get_by_role("button").click()
    assert await page.evaluate(_TOO_SMALL) == []
    await page.keyboard.press("Escape")
    await page.locator("#close-list").click()
    await page.get_by_role("button", name="Settings").click()
    await expect(page.locator("#settings-dialog")).to_be_visible()
    assert await page.evaluate(_TOO_SMALL) == []
    await context.close()


async def test_settings_stand_beside_what_they_are(page: Page, demo_server: Served) -> None:
    """Boxes and buttons before their texts; and the way out is in sight."""
    await page.set_viewport_size({"width": 1024, "height": 768})
    await open_page(page, demo_server.base_url)
    await page.get_by_role("button", name="Settings").click()
    await expect(page.locator("#settings-dialog")).to_be_visible()
    places = await page.locator("#settings-dialog :is([type=checkbox], [type=radio])").evaluate_all(
        """(boxes) => boxes.map((box) => {
          const text = document.createRange();
          text.selectNodeContents(box.nextSibling);
          const { left, right, width } = box.getBoundingClientRect();
          const label = box.closest("label").getBoundingClientRect();
          return [left - label.left, width, text.getBoundingClientRect().left - right];
        })"""
    )
    assert len(places) == 8
    for indent, width, gap in places:
        assert (indent, width) == (0, 16)
        assert 0 < gap < 16
    await expect(page.get_by_role("button", name="Done")).to_be_in_viewport(ratio=1)
    await page.get_by_role("button", name="Done").click()
    await expect(page.get_by_role("dialog")).to_be_hidden()


async def test_to_delete_does_not_look_like_to_save(
    page: Page, demo_server: Served, api: httpx.AsyncClient
) -> None:
    await make_conversation(api, [("user", "Hello")])
    await open_page(page, demo_server.base_url)
    row = page.locator("#conversations li").first
    await row.hover()
    await row.get_by_role("button").click()
    save, delete = [
        await page.get_by_role("menuitem", name=name).evaluate(
            "node => getComputedStyle(node).color"
        )
        for name in ("Save as Markdown", "Delete")
    ]
    assert save != delete


@pytest.mark.exhaustive
async def test_all_of_a_conversation_is_printed(
    page: Page, demo_server: Served, api: httpx.AsyncClient
) -> None:
    """On white, whatever the theme, and without what cannot be used on paper."""
    long = "\n".join(f"Line {number}" for number in range(60))
    said = [("user", long), *[("assistant", f"Paragraph {number}.") for number in range(80)]]
    conversation = await make_conversation(api, said)
    await open_page(page, f"{demo_server.base_url}/#{conversation}", theme="dark")
    await expect(page.locator(".message")).to_have_count(81)
    pdf = await page.pdf()
    assert len(re.findall(rb"/Type\s*/Page\b", pdf)) >= 3
    await page.emulate_media(media="print")
    for part in ("#sidebar", ".top", "#composer", ".turn .tools button", ".bubble-more"):
        await expect(page.locator(part).first).to_be_hidden()
    cut = page.locator(".bubble-text")
    assert await cut.evaluate("node => node.scrollHeight <= node.clientHeight + 1")
    assert await page.evaluate("scroller.scrollHeight <= scroller.clientHeight")
    ink = await page.evaluate("getComputedStyle(document.querySelector('.prose')).color")
    assert max(map(int, re.findall(r"\d+", ink)[:3])) < 60


@pytest.mark.exhaustive
async def test_the_message_box_is_as_wide_as_the_text(
    browser: Browser, demo_server: Served, api: httpx.AsyncClient
) -> None:
    """Also where there are scroll bars, which Playwright hides unless told not to."""
    said = [("assistant", f"Paragraph {number}.") for number in range(40)]
    conversation = await make_conversation(api, said)
    started = await browser.browser_type.launch(
        executable_path=shutil.which("chromium"),
        args=CHROMIUM_ARGS,
        ignore_default_args=["--hide-scrollbars"],
    )
    page = await started.new_page()
    await open_page(page, f"{demo_server.base_url}/#{conversation}")
    await expect(page.locator(".message")).to_have_count(40)
    await page.mouse.move(500, 300)
    await page.mouse.wheel(0, -300)
    latest = page.get_by_role("button", name="Latest")
    await expect(latest).to_be_visible()
    for width in (700, 1024, 1400):
        await page.set_viewport_size({"width": width, "height": 640})
        # The page hears of the new width after it has been laid out in it.
        await expect(page.locator("#sidebar")).to_be_visible(visible=width > 860)
        assert await page.evaluate("scroller.offsetWidth - scroller.clientWidth") > 0
        text, box, button = [
            await part.bounding_box()
            for part in (page.locator("#transcript"), page.locator("#composer"), latest)
        ]
        assert text is not None
        assert box is not None
        assert button is not None
        assert (text["x"], text["width"]) == (box["x"], box["width"])
        assert box["y"] - 40 < button["y"] + button["height"] < box["y"]  # over the text's end
    await started.close()


@pytest.mark.exhaustive
async def test_a_quotation_from_right_to_left_has_its_bar_on_the_right(
    page: Page, demo_server: Served, api: httpx.AsyncClient
) -> None:
    conversation = await make_conversation(api, [("assistant", "> שלום עולם\n\ntext\n\n> Hello")])
    await open_page(page, f"{demo_server.base_url}/#{conversation}")
    await expect(page.locator(".prose blockquote")).to_have_count(2)
    bars = await page.locator(".prose blockquote").evaluate_all(
        """(quotes) => quotes.map(getComputedStyle)
          .map((style) => [style.borderLeftWidth, style.borderRightWidth])"""
    )
    assert bars == [["0px", "3px"], ["3px", "0px"]]


@pytest.mark.exhaustive
async def test_headings_toggles_and_the_editor(
    page: Page, demo_server: Served, api: httpx.AsyncClient
) -> None:
    conversation = await make_conversation(api, [("user", "Hello"), ("assistant", "# Title")])
    levels = """() => [...document.querySelectorAll("h1, h2, h3, h4, h5, h6")]
      .filter((node) => node.checkVisibility()).map((node) => Number(node.localName[1]))"""
    await open_page(page, demo_server.base_url, max_output_tokens=5)
    assert await page.evaluate(levels) == [1, 2]
    await page.evaluate(f"location.hash = '#{conversation}'")
    await expect(page.locator(".bubble")).to_be_visible()
    assert await page.evaluate(levels) == [1, 2, 3, 3, 4]
    # One button for the list, wherever it is shown.
    toggles = page.locator("#toggle-list:visible, #close-list:visible")
    await expect(toggles).to_have_count(1)
    await toggles.click()
    await expect(page.locator("#sidebar")).to_be_hidden()
    await expect(toggles).to_have_count(1)
    # What can be done with an answer is in sight under the last one, and under one that is used.
    await say(page, "Hello!")
    tools = page.locator(".foot .tools")
    await expect(tools).to_have_count(2)
    await expect(tools.first).to_have_css("opacity", "0")
    await expect(tools.last).to_have_css("opacity", "1")
    await tools.first.get_by_role("button").first.focus()
    await expect(tools.first).to_have_css("opacity", "1")
    await finished(page.locator(".turn").last)
    # In place of a message being edited there is its editor alone.
    edit = page.get_by_role("button", name="Edit", exact=True).first
    await edit.press("Enter")
    await expect(page.locator(".message.user .tools").first).to_be_hidden()
    await page.keyboard.press("Escape")
    await expect(edit).to_be_focused()


@pytest.mark.external
@pytest.mark.node
async def test_axe_finds_nothing_serious(
    page: Page, demo_server: Served, api: httpx.AsyncClient, axe: str
) -> None:
    await open_page(page, demo_server.base_url, max_output_tokens=5)
    assert await violations(page, axe) == []
    text = "# Title\n\n- a\n- `b`\n\n```js\nlet x;\n```"
    conversation = await make_conversation(
        api, [("system", "Be brief."), ("user", "Hello"), ("assistant", text)]
    )
    await page.goto(f"{demo_server.base_url}/#{conversation}")
    await expect(page.locator(".code")).to_be_visible()
    turn = await say(page, STORY)
    await finished(turn)
    await expect(turn.get_by_role("button", name="Continue")).to_be_enabled()
    await turn.get_by_role("button", name="Regenerate").click()
    await expect(turn.locator(".place")).to_have_text("2/2")
    await turn.get_by_role("button", name="Figures").click()
    assert await violations(page, axe) == []
    await page.get_by_role("button", name="Settings").click()
    assert await violations(page, axe) == []
    await page.get_by_role("button", name="Done").click()
    await say(page, "much " * NUM_CONTEXT_TOKENS)
    await expect(page.get_by_role("button", name="Edit message")).to_be_visible()
    assert await violations(page, axe) == []
    await page.set_viewport_size({"width": 320, "height": 640})
    assert await violations(page, axe) == []
    await page.get_by_role("button", name="Conversations", exact=True).click()
    await expect(page.locator("#conversations a").first).to_be_visible()
    assert await violations(page, axe) == []
    row = page.locator("#conversations li").first
    await row.hover()
    await row.get_by_role("button").click()
    await expect(page.get_by_role("menu")).to_be_visible()
    assert await violations(page, axe) == []
    await page.get_by_role("menuitem", name="Delete").click()
    await expect(page.get_by_role("button", name="Undo")).to_be_visible()
    assert await violations(page, axe) == []
    await make_conversation(api, [("user", "A title")])
    await page.keyboard.press("Control+k")
    await page.get_by_role("searchbox").fill("title")
    await expect(page.locator("#found mark").first).to_be_visible()
    assert await violations(page, axe) == []


@pytest.mark.exhaustive
async def test_nothing_moves_while_an_answer_comes(page: Page, demo_server: Served) -> None:
    await stories(page, _NUM_TOKENS)
    await open_page(page, demo_server.base_url)
    await finished(await say(page, "Hello!"))
    await page.wait_for_timeout(600)  # what follows an input so closely does not count
    await page.evaluate(_WATCH)
    turn = await say(page, STORY)
    await finished(turn)
    await page.wait_for_timeout(200)
    seen = await page.evaluate("window.seen")
    assert seen["shifts"] == []
    await turn.get_by_role("button", name="Figures").click()
    await expect(turn.locator(".stats")).to_contain_text(f"{_NUM_TOKENS} tokens")
    # Once per frame, however many tokens come.
    assert seen["changes"] <= seen["frames"] + 5


@pytest.mark.exhaustive
async def test_two_hundred_messages_stay_smooth(
    page: Page, demo_server: Served, api: httpx.AsyncClient
) -> None:
    roles = ("user", "assistant")
    said = [(roles[number % 2], f"m{number}") for number in range(200)]
    conversation = await make_conversation(api, said)
    await open_page(page, f"{demo_server.base_url}/#{conversation}", max_output_tokens=60)
    await expect(page.locator(".message")).to_have_count(200)
    await expect(page.locator(".message").last).to_be_in_viewport()
    await page.evaluate(_WATCH)
    turn = await say(page, STORY)
    await finished(turn)
    await expect(turn.locator(".prose")).to_be_in_viewport()
    seen = await page.evaluate("window.seen")
    assert seen["shifts"] == []
    # What an answer costs does not grow with what was said before it.
    assert seen["changes"] > 0
    assert seen["elsewhere"] == 0
    await page.mouse.move(500, 300)
    await page.mouse.wheel(0, -4_000)
    await expect(page.get_by_role("button", name="Latest")).to_be_visible()
    await page.get_by_role("button", name="Latest").click()
    await expect(turn.locator(".prose")).to_be_in_viewport()


@pytest.mark.exhaustive
async def test_scrolling_follows_until_the_reader_scrolls_up(
    page: Page, demo_server: Served, api: httpx.AsyncClient
) -> None:
    distance = """(() => {
      const { scrollHeight, clientHeight, scrollTop } = document.querySelector("#scroller");
      return scrollHeight - clientHeight - scrollTop;
    })()"""
    said = [("assistant", f"Paragraph {number}.") for number in range(20)]
    conversation = await make_conversation(api, said)
    await stories(page)
    await open_page(page, f"{demo_server.base_url}/#{conversation}")
    await expect(page.locator(".message")).to_have_count(20)
    turn = await say(page, STORY)
    await growing(turn)
    # Between two frames there may be text that it has not followed yet.
    await page.wait_for_function(f"() => {distance} < 40")
    await page.mouse.move(500, 300)
    await page.mouse.wheel(0, -300)
    latest = page.get_by_role("button", name="Latest")
    await expect(latest).to_be_visible()
    await growing(turn, len(await turn.locator(".prose").inner_text()) + 40)
    await stopped(page, turn)
    assert await page.evaluate(distance) > 250
    await latest.click()
    await expect(latest).to_be_hidden()
    await page.wait_for_function(f"() => {distance} < 2")


@pytest.mark.exhaustive
async def test_a_narrow_screen(page: Page, demo_server: Served, api: httpx.AsyncClient) -> None:
    conversation = await make_conversation(
        api, [("user", "x" * 400), ("assistant", f"```\n{'y' * 400}\n```")], title="Wide things"
    )
    await page.set_viewport_size({"width": 320, "height": 640})
    await open_page(page, f"{demo_server.base_url}/#{conversation}")
    await expect(page.locator(".code")).to_be_visible()
    assert await page.evaluate("document.documentElement.scrollWidth <= 320")
    assert await page.evaluate("document.querySelector('main').scrollWidth <= 320")
    toggle = page.get_by_role("button", name="Conversations", exact=True)
    await toggle.click()
    await expect(page.get_by_role("button", name="New chat")).to_be_focused()
    await page.keyboard.press("Escape")
    await expect(toggle).to_be_focused()
    await toggle.click()
    await page.get_by_role("button", name="New chat").click()
    await expect(page.locator("#welcome")).to_be_visible()
    await toggle.click()
    await page.get_by_role("link", name="Wide things").first.click()
    await expect(page.locator("#sidebar")).to_be_hidden()
    await expect(page.locator(".code")).to_be_visible()


async def test_the_face(page: Page, demo_server: Served, api: httpx.AsyncClient) -> None:
    """Inter, lines of some 70 characters, the chat's title above it, and a welcome by the model."""

    async def rename(route: Route) -> None:
        models = await (await route.fetch()).json()
        models["data"][0]["id"] = "another-model"
        await route.fulfill(json=models)

    words = "The quick brown fox jumps over the lazy dog, and then it goes home again. " * 4
    conversation = await make_conversation(
        api, [("user", "Hello"), ("assistant", words)], title="What is above"
    )
    await page.set_viewport_size({"width": 1200, "height": 760})
    await open_page(page, demo_server.base_url)
    assert await page.evaluate(
        "document.fonts.ready.then(() => document.fonts.check('16px Inter'))"
    )
    await expect(page.locator("#suggestions button")).to_have_count(6)
    await expect(page.locator("#suggestions button").last).to_be_in_viewport(ratio=1)
    box = await page.locator("#composer").bounding_box()
    assert box is not None
    assert 300 < box["y"] < 600
    await page.evaluate(f"location.hash = '#{conversation}'")
    await expect(page.locator("#chat-title")).to_have_text("What is above")
    lines = await page.locator(".prose p").evaluate(
        "node => node.textContent.length * 26.4 / node.getBoundingClientRect().height"
    )
    assert 62 <= lines <= 78
    await page.route("**/v1/models", rename)
    await page.goto(demo_server.base_url)
    await expect(page.locator("#welcome")).to_contain_text("to another-model.")
    await expect(page.locator("#suggestions")).to_be_hidden()
    box = await page.locator("#composer").bounding_box()
    assert box is not None
    assert 300 < box["y"] < 460  # in the middle


async def test_roles_weight_and_requests(page: Page, demo_server: Served) -> None:
    await page.goto(demo_server.base_url)
    await connected(page)
    for role, name in (
        ("main", "Conversation"), ("log", "Messages"), ("navigation", "Conversations"),
        ("complementary", "Conversations"), ("banner", None), ("contentinfo", None),
    ):  # fmt: skip
        named = {} if name is None else {"name": name}
        await expect(page.get_by_role(role, **named)).to_be_attached()  # type: ignore[arg-type]
    await expect(page.get_by_role("heading", name="penstock", level=1)).to_be_visible()
    sizes = json.loads(
        await page.evaluate(
            """JSON.stringify([
              ...performance.getEntriesByType("navigation"),
              ...performance.getEntriesByType("resource"),
            ].map((one) => [one.name, one.transferSize]))"""
        )
    )
    assert len(sizes) > 10
    # What the server has of conversations is as much as other tests have left there.
    files = [size for name, size in sizes if "/v1/" not in name]
    assert sum(files) < _MAX_PAGE_BYTES
