"""How answers look that are written in Markdown."""

from __future__ import annotations

import httpx
import pytest
from playwright.async_api import Page

from ..processes import Served
from .conftest import make_conversation
from .page_flow import ask, open_page

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]


async def test_markdown_and_copying(
    page: Page, demo_server: Served, api: httpx.AsyncClient
) -> None:
    code = "print('<b>')\n\nx = 1"
    text = (
        "Some **bold**, *italic* and `code`.\n\n1. one\n2. two\n   - nested\n\n"
        f"```python\n{code}\n```\n\n| a | b |\n|---|--:|\n| <b> | 2 |\n\n> שלום\n\n"
        "[y](https://example.org/y) [x](javascript:alert(1))"
    )
    conversation = await make_conversation(api, [("user", "markdown"), ("assistant", text)])
    await page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    await open_page(page, f"{demo_server.base_url}/#{conversation}")
    prose = page.locator(".prose")
    assert await prose.locator("> p > strong").inner_text() == "bold"
    assert await prose.locator("> p > em").inner_text() == "italic"
    assert await prose.locator("> p > code").inner_text() == "code"
    assert await prose.locator("> ol > li").count() == 2
    assert await prose.locator("> ol > li > ul > li").inner_text() == "nested"
    assert await prose.locator(".code-head span").inner_text() == "python"
    assert await prose.locator("> .table td").all_inner_texts() == ["<b>", "2"]
    quoted = prose.locator("> blockquote > p")
    assert await quoted.evaluate("node => getComputedStyle(node).direction") == "rtl"
    assert await prose.locator("> p").last.inner_text() == "y [x](javascript:alert(1))"
    assert await prose.locator("a").all_inner_texts() == ["y"]
    assert await prose.locator("a").get_attribute("rel") == "noopener noreferrer"
    await prose.get_by_role("button", name="Copy code").click()
    assert await page.evaluate("navigator.clipboard.readText()") == code
    answer = await ask(page, "What is penstock?")
    await page.keyboard.press("Alt+c")
    await page.wait_for_function(
        "async (text) => (await navigator.clipboard.readText()) === text", arg=answer
    )


async def test_tables_read_from_the_right_where_their_letters_do(
    page: Page, demo_server: Served, api: httpx.AsyncClient
) -> None:
    texts = (
        "| 1 שם ארוך מאוד | another long name |\n|---|---|\n| abc | ג |",
        "| 1 a | another long name |\n|---|---|\n| 1 | ד |",
    )
    conversation = await make_conversation(api, [("assistant", text) for text in texts])
    await open_page(page, f"{demo_server.base_url}/#{conversation}")
    hebrew, english = page.locator("table").first, page.locator("table").last
    lefts = "nodes => nodes.map(node => node.getBoundingClientRect().left)"
    for table, is_reversed in ((hebrew, True), (english, False)):
        for row in await table.locator("tr").all():
            found = await row.locator("th, td").evaluate_all(lefts)
            assert found == sorted(found, reverse=is_reversed)
    # Within a cell, its own letters decide on which side the text stands.
    gaps = """nodes => nodes.map(node => {
      const range = document.createRange();
      range.selectNodeContents(node);
      const [text, cell] = [range.getBoundingClientRect(), node.getBoundingClientRect()];
      return text.left - cell.left < cell.right - text.right ? "left" : "right";
    })"""
    assert await hebrew.locator("td").evaluate_all(gaps) == ["left", "right"]
    assert await english.locator("td").evaluate_all(gaps) == ["left", "right"]


async def test_markdown_piece_by_piece_equals_markdown_at_once(
    page: Page, demo_server: Served
) -> None:
    await open_page(page, demo_server.base_url)
    different = await page.evaluate(
        r"""async () => {
          const { MarkdownStream } = await import("./markdown.js");
          const texts = [
            "a **b *c* d** `e`\n\n\n# head\ntext\n- x\n  - y\n    z\n- w\n\n3. q\n4. r\n\nend",
            "```js\nlet a;\n\n- no list\n```\nafter\n~~~\nopen\n\n# no head", "****",
            "1. a\n\n2. b\n\n\n", "- a\n\n2", "* star *\n*a*b*c* _d_ e_f_g __ `` ` ``` x",
            "text\n| a | b |\n|:-|-:|\n| 1 \\| 2 | **x** |\n\n---\n***\n> q\n> > r\n> - s\n\nend",
            "a\n---x\n| a |\n|-|x\n|-|\n\\*no\\* ~~s~~ ***b*** [l](https://a.b/c_d) https://e.f/g).",
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
