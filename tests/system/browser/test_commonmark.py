"""The examples of CommonMark's specification, as the chat page draws them."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page, Route

from ..processes import Served
from .conftest import MARKDOWN_TREES
from .page_flow import open_page

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="session")]

_NUM_EXAMPLES = 652
_NUM_MET = 647
_EXAMPLE = re.compile(
    r"^`{32} example\n(.*?)^\.\n(.*?)^`{32}$|^#{1,6} *([^\n]*)$", re.MULTILINE | re.DOTALL
)
# The page refuses most links of the examples, which lead nowhere, and makes links of images. Here
# it draws both, so that what is in them is compared too.
_ALL_LINKS = """
  export function linkTo(address, title, fill) {
    const node = document.createElement("a");
    fill(node);
    return node;
  }
  export const pictureAt = () => document.createElement("img");
"""


def _examples(specification: str) -> list[dict[str, Any]]:
    found, section = [], ""
    for markdown, html, heading in _EXAMPLE.findall(specification.replace("→", "\t")):
        section = heading or section
        if not heading:
            found.append({"markdown": markdown, "html": html, "section": section})
    return found


@pytest.mark.external
@pytest.mark.node
async def test_examples_of_commonmark(page: Page, demo_server: Served, packages: Path) -> None:
    """Text and elements; HTML is text. Of the five others, four are addresses that GitHub's
    Markdown makes links of, and one has names of characters that HTML 4 has not."""

    async def serve(route: Route) -> None:
        await route.fulfill(body=_ALL_LINKS, content_type="text/javascript")

    examples = _examples((packages / "commonmark-spec" / "spec.txt").read_text("utf-8"))
    assert len(examples) == _NUM_EXAMPLES
    await page.route("**/markdown-links.js", serve)
    await open_page(page, demo_server.base_url)
    await page.evaluate((packages / "commonmark" / "dist" / "commonmark.js").read_text("utf-8"))
    await page.evaluate(MARKDOWN_TREES)
    wanted = await page.evaluate("(examples) => wantedOf(examples)", examples)
    assert all(one["isExample"] for one in wanted)
    texts = [example["markdown"] for example in examples]
    drawn = await page.evaluate("(texts) => drawnOf(texts)", texts)
    missed = [
        (example["section"], example["markdown"], tree, one["tree"])
        for example, tree, one in zip(examples, drawn, wanted, strict=True)
        if tree != one["tree"]
    ]
    for section, num_missed in Counter(section for section, *_ in missed).items():
        print(f"{section}: {num_missed} missed")
    assert len(missed) <= _NUM_EXAMPLES - _NUM_MET, missed
    assert await page.evaluate("(texts) => drawnOf(texts, 3)", texts) == drawn
