"""Images on the page: chosen, pasted and dropped, made smaller, sent, shown and kept."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.async_api import Page, expect

from tests.engine.vision_models import picture, save_model

from ..processes import Served, serve
from .page_flow import finished, open_page, say

pytestmark = [
    pytest.mark.browser,
    pytest.mark.exhaustive,
    pytest.mark.asyncio(loop_scope="session"),
]

_GIVE = """([kind, file]) => {
  const bytes = Uint8Array.from(atob(file), (each) => each.charCodeAt(0));
  const data = new DataTransfer();
  data.items.add(new File([bytes], "a.png", { type: "image/png" }));
  const target = document.getElementById("composer-text");
  target.dispatchEvent(kind === "paste"
    ? new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true })
    : new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true }));
}"""
_SIDES = "(images) => images.map((image) => Math.max(image.naturalWidth, image.naturalHeight))"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = tmp_path_factory.mktemp("llava")
    save_model("llava", path)
    with serve(str(path), "--dtype", "float32", "--num-blocks", "200", log=path / "log") as served:
        yield served


async def test_images_are_sent_shown_and_kept(page: Page, server: Served, tmp_path: Path) -> None:
    await open_page(page, server.base_url, max_output_tokens=8)
    await expect(page.get_by_role("button", name="Add images")).to_be_visible()
    large = tmp_path / "large.png"
    large.write_bytes(picture(0, 1500, 900))
    await page.locator("#files").set_input_files(large)
    for kind in ("paste", "drop"):
        await page.evaluate(_GIVE, [kind, base64.b64encode(picture(1)).decode()])
    tray = page.locator("#tray img")
    await expect(tray).to_have_count(3)
    assert all(side <= 1024 for side in await tray.evaluate_all(_SIDES))
    await page.get_by_role("button", name="Remove image").last.click()
    await expect(tray).to_have_count(2)
    turn = await say(page, "What are these?")
    await finished(turn)
    await expect(tray).to_have_count(0)
    await expect(turn.locator("img.picture")).to_have_count(2)
    await page.reload()
    kept = page.locator(".turn").first.locator("img.picture")
    await expect(kept).to_have_count(2)
    await page.wait_for_function(
        f"() => ({_SIDES})([...document.images]).every((side) => side > 0)"
    )
    await page.locator("#files").set_input_files(
        {"name": "x", "mimeType": "image/png", "buffer": b"x"}
    )
    await expect(page.locator("#refusal")).to_contain_text("not an image")


async def test_a_model_without_images_offers_none(page: Page, demo_server: Served) -> None:
    await open_page(page, demo_server.base_url)
    await expect(page.get_by_role("button", name="Add images")).to_be_hidden()
    await page.evaluate(_GIVE, ["paste", base64.b64encode(picture(1)).decode()])
    await expect(page.locator("#refusal")).to_contain_text("takes no images")
