"""What answers have beyond text: formulas, colours of code, thoughts, pictures."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.async_api import Page, Route, expect

from tests.engine.vision.vision_models import picture

from ..processes import Served
from .conftest import make_conversation
from .page_flow import ANSWER_TIMEOUT_MS, open_page

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="session")]


def requested(page: Page) -> list[str]:
    """Names of the files of others that the page loads, from now on."""
    names: list[str] = []
    page.on(
        "request",
        lambda request: "/vendor/" in request.url and names.append(request.url.split("/")[-1]),
    )
    return names


@pytest.mark.exhaustive
async def test_formulas_are_set(page: Page, demo_server: Served, api: httpx.AsyncClient) -> None:
    """As MathML; what is none, or hostile, stays as it is written. Nothing is loaded before."""
    names = requested(page)
    await open_page(page, demo_server.base_url)
    assert "katex.js" not in names
    assert "highlight.js" not in names
    text = (
        "So $a^2 + b_1$, **or \\(x*y*z\\)**, costs $5 and $6, `$a$`, $\\wrong{$, "
        "$\\href{javascript:alert(1)}{x}$.\n\n"
        "\\[\n\\frac{1}{2} \\fcolorbox{red}{white}{x}\n\\]\n\n$$c = \\sqrt{d}$$\n\n"
        "- item $e$\n\n| $f$ |\n|---|\n| 1 |\n"
    )
    conversation = await make_conversation(api, [("user", "Hello"), ("assistant", text)])
    await page.evaluate(f"location.hash = '#{conversation}'")
    prose = page.locator(".prose")
    math = prose.locator("math")
    await expect(math).to_have_count(6)
    await expect(prose.locator("math[display=block]")).to_have_count(2)
    await expect(prose.locator("strong math")).to_have_attribute("aria-label", "x*y*z")
    await expect(prose.locator("li math mi")).to_have_text("e")
    await expect(prose.locator("th math mi")).to_have_text("f")
    await expect(prose).to_contain_text("costs $5 and $6, $a$, $\\wrong{$, $\\href{javascript:")
    assert await prose.locator("[style], a").count() == 0
    assert names.count("katex.js") == 1


_CODE = "# a comment\ndef f(x):\n    return 'text' * 12\n\n\nf(2)\n"


@pytest.mark.exhaustive
async def test_code_is_coloured_wrapped_copied_and_saved(
    page: Page, demo_server: Served, api: httpx.AsyncClient, tmp_path: Path
) -> None:
    texts = [f"```python\n{_CODE}```", "```\nplain\n```", "```js\nlet a; // \u202e\n```"]
    said = [("user", "Hello"), *[("assistant", text) for text in texts]]
    conversation = await make_conversation(api, said)
    await page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    await open_page(page, f"{demo_server.base_url}/#{conversation}")
    block = page.locator(".code").first
    colours = block.locator("[class^=hl-]")
    await expect(block.locator(".hl-comment")).to_have_text("# a comment")
    await expect(block.locator(".hl-keyword")).to_have_text(["def", "return"])
    await expect(block.locator(".hl-string")).to_have_text("'text'")
    assert (
        len(set(await colours.evaluate_all("all => all.map(n => getComputedStyle(n).color)"))) > 3
    )
    code = _CODE.removesuffix("\n")
    assert await block.locator("pre").evaluate("pre => pre.textContent") == code
    await block.get_by_role("button", name="Copy code").click()
    assert await page.evaluate("navigator.clipboard.readText()") == code
    await page.evaluate("() => { navigator.clipboard.writeText = () => Promise.reject(1); }")
    await page.locator(".code").nth(1).get_by_role("button", name="Copy code").click()
    await page.wait_for_function(
        "async () => (await navigator.clipboard.readText()) === 'plain'"  # in another way
    )
    async with page.expect_download() as download:
        await block.get_by_role("button", name="Save code").click()
    file = await download.value
    assert file.suggested_filename == "code.py"
    await file.save_as(tmp_path / "code.py")
    assert (tmp_path / "code.py").read_text() == f"{code}\n"
    wrap = block.get_by_role("button", name="Wrap lines")
    await wrap.click()
    await expect(wrap).to_have_attribute("aria-pressed", "true")
    space = await block.locator("pre code").evaluate("n => getComputedStyle(n).whiteSpace")
    assert space == "pre-wrap"
    # What nobody sees is shown, and so this one has no colours.
    await expect(page.locator(".code").last.locator(".hidden-character")).to_have_count(1)
    await expect(page.locator(".code").last.locator("[class^=hl-]")).to_have_count(0)


@pytest.mark.exhaustive
async def test_code_is_coloured_as_it_comes(page: Page, demo_server: Served) -> None:
    """By lines; its text is right at every moment, also where the end of the block is guessed."""
    await open_page(page, demo_server.base_url)
    wrong = await page.evaluate(
        """async (code) => {
          const { MarkdownStream } = await import("./markdown.js");
          const { Colours, setFormula } = await import("./markdown-extras.js");
          const root = document.querySelector("#transcript");
          const stream = new MarkdownStream(root, { Colours, setFormula });
          const wrong = [];
          stream.append("```python\\n");
          let given = "";
          for (const character of code + "``") {
            stream.append(character);
            given += character;
            if (character === "\\n") await new Promise((resolve) => setTimeout(resolve, 300));
            const shown = root.querySelector("pre").textContent;
            if (shown !== given && shown !== given.replace(/\\n$/, "")) wrong.push([shown, given]);
          }
          const hasColours = () => root.querySelectorAll("[class^=hl-]").length >= 4;
          const latest = performance.now() + LATEST;
          while (!hasColours() && performance.now() < latest)
            await new Promise((resolve) => setTimeout(resolve, 50));
          if (!hasColours()) wrong.push("no colours before the end of the block");
          stream.append("`\\n\\nAfter");
          return wrong;
        }""".replace("LATEST", str(ANSWER_TIMEOUT_MS)),
        _CODE,
    )
    assert wrong == []
    pre = page.locator("#transcript pre")
    assert await pre.evaluate("pre => pre.textContent") == _CODE.removesuffix("\n")


@pytest.mark.exhaustive
async def test_headings_have_a_scale(
    page: Page, demo_server: Served, api: httpx.AsyncClient
) -> None:
    text = "\n\n".join(f"{'#' * depth} Heading" for depth in range(1, 7))
    conversation = await make_conversation(api, [("user", "Hello"), ("assistant", text)])
    await open_page(page, f"{demo_server.base_url}/#{conversation}")
    heads = page.locator(".prose [data-depth]")
    await expect(heads).to_have_count(6)
    sizes = await heads.evaluate_all(
        "all => all.map(n => parseFloat(getComputedStyle(n).fontSize))"
    )
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] >= 24
    assert len(set(sizes)) >= 4


async def add_output(page: Page, *items: dict[str, Any]) -> None:
    """The first turn has these before its text."""

    async def add(route: Route) -> None:
        tree = await (await route.fetch()).json()
        turn = tree["data"][0]
        turn["items"][1:1] = items
        await route.fulfill(json=tree)

    await page.route("**/tree?items=true", add)


@pytest.mark.exhaustive
async def test_thoughts_are_markdown(
    page: Page, demo_server: Served, api: httpx.AsyncClient
) -> None:
    thought = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "It is **bold**:\n\n- $a$\n- <b>"}],
    }
    call = {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "f", "arguments": "{}"}
    await add_output(page, thought, call)
    conversation = await make_conversation(api, [("user", "Hello"), ("assistant", "Hi")])
    await open_page(page, f"{demo_server.base_url}/#{conversation}")
    block = page.locator(".block.reasoning")
    await block.locator("summary").click()
    await expect(block.locator(".said strong")).to_have_text("bold")
    await expect(block.locator(".said li")).to_have_count(2)
    await expect(block.locator(".said li math")).to_have_count(1)
    card = page.locator(".block.call")
    await expect(card.locator("summary")).to_have_text("Called f")
    box = await card.bounding_box()
    assert box is not None
    assert box["height"] >= 40
    # How long it took is known of one that is seen: time stands in for a long one.
    title = await page.evaluate(
        """async () => {
          const { Blocks } = await import("./blocks.js");
          const blocks = new Blocks();
          const now = performance.now.bind(performance);
          const group = blocks.newGroup();
          const thought = { kind: "reasoning", id: "1", text: "a", isDone: false };
          blocks.show(thought);
          performance.now = () => now() + 68_000;
          blocks.show({ ...thought, isDone: true });
          performance.now = now;
          return group.textContent;
        }"""
    )
    assert re.match(r"Thought for 1 min 8 s", title)


@pytest.mark.exhaustive
async def test_a_picture_is_enlarged(
    page: Page, demo_server: Served, api: httpx.AsyncClient
) -> None:
    url = "data:image/png;base64," + base64.b64encode(picture(0, 300, 200)).decode()

    async def add(route: Route) -> None:
        tree = await (await route.fetch()).json()
        part = {"type": "input_image", "image_url": url}
        tree["data"][0]["items"][0]["content"].insert(0, part)
        await route.fulfill(json=tree)

    await page.route("**/tree?items=true", add)
    conversation = await make_conversation(api, [("user", "Hello")])
    await open_page(page, f"{demo_server.base_url}/#{conversation}")
    small = page.get_by_title("Enlarge")
    for close in ("Escape", "click"):
        await small.press("Enter")
        large = page.get_by_role("dialog")
        await expect(large.locator("img")).to_be_visible()
        boxes = [await each.bounding_box() for each in (small, large.locator("img"))]
        assert boxes[0] is not None
        assert boxes[1] is not None
        assert boxes[1]["width"] > 1.5 * boxes[0]["width"]
        await (page.keyboard.press(close) if close == "Escape" else large.locator("img").click())
        await expect(large).to_have_count(0)
        await expect(small).to_be_focused()
