"""Images on the page: chosen, pasted and dropped, made smaller, sent, shown and kept; and what
becomes of them when a message is not taken."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.async_api import FilePayload, Page, Route, expect

from tests.engine.vision.vision_models import picture, save_model

from ..processes import Served, serve
from .conftest import make_conversation
from .page_flow import connected, conversation_of, finished, open_page, say

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="session")]

_GIVE = """([kind, file, name = "a.png", type = "image/png"]) => {
  const bytes = Uint8Array.from(atob(file), (each) => each.charCodeAt(0));
  const data = new DataTransfer();
  data.items.add(new File([bytes], name, { type }));
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


def file(name: str, seed: int = 0) -> FilePayload:
    return {"name": name, "mimeType": "image/png", "buffer": picture(seed)}


async def seeing(page: Page) -> None:
    """The page believes, from its next load on, that the server's model takes images."""

    async def add_images(route: Route) -> None:
        models = await (await route.fetch()).json()
        for model in models["data"]:
            model["input_modalities"] = ["text", "image"]
        await route.fulfill(json=models)

    await page.route("**/v1/models", add_images)


async def names(page: Page) -> list[str | None]:
    """Of the images that wait to be sent."""
    shown = page.locator("#tray img")
    return [await each.get_attribute("alt") for each in await shown.all()]


@pytest.mark.exhaustive
async def test_images_are_sent_shown_and_kept(page: Page, server: Served, tmp_path: Path) -> None:
    await open_page(page, server.base_url, max_output_tokens=8)
    await expect(page.get_by_role("button", name="Add files")).to_be_visible()
    large = tmp_path / "large.png"
    large.write_bytes(picture(0, 1500, 900))
    await page.locator("#files").set_input_files(large)
    for kind in ("paste", "drop"):
        await page.evaluate(_GIVE, [kind, base64.b64encode(picture(1)).decode()])
    tray = page.locator("#tray img")
    await expect(tray).to_have_count(3)
    assert all(side <= 1024 for side in await tray.evaluate_all(_SIDES))
    await page.get_by_role("button", name="Remove a.png").last.click()
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
    # An answer that is edited is a version of the same message, with its pictures.
    await turn.get_by_role("button", name="Edit answer").click()
    await page.get_by_role("textbox", name="Edit the answer").fill("Gradients.")
    await page.keyboard.press("Control+Enter")
    await expect(turn.locator(".assistant .prose")).to_have_text("Gradients.")
    await expect(turn.locator(".place")).to_have_text("2/2")
    await expect(kept).to_have_count(2)
    svg = b'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 9 4"><circle r="2" cx="4"/></svg>'
    await page.locator("#files").set_input_files(
        {"name": "a.svg", "mimeType": "image/svg+xml", "buffer": svg}
    )
    await expect(tray).to_have_count(1)
    await expect(tray).to_have_attribute("src", re.compile("^data:image/jpeg"))
    await finished(await say(page, "And now?"))
    await page.locator("#files").set_input_files(
        {"name": "x", "mimeType": "image/png", "buffer": b"x"}
    )
    await expect(page.locator("#refusal")).to_contain_text("not an image")


@pytest.mark.exhaustive
async def test_pictures_stand_in_their_order_beside_a_message_of_full_width(
    page: Page, demo_server: Served, api: httpx.AsyncClient
) -> None:
    """As the server has them; each as large as it would be alone."""
    urls = [
        "data:image/png;base64," + base64.b64encode(picture(seed, 200, 160)).decode()
        for seed in range(2)
    ]

    async def add_pictures(route: Route) -> None:
        tree = await (await route.fetch()).json()
        parts = [{"type": "input_image", "image_url": url} for url in urls]
        tree["data"][0]["items"][0]["content"][:0] = parts
        await route.fulfill(json=tree)

    await page.route("**/tree?items=true", add_pictures)
    text = "Which of these two is the larger one, and which is the one with more blue in it? " * 2
    conversation = await make_conversation(api, [("user", text)])
    for width in (1000, 390):
        await page.set_viewport_size({"width": width, "height": 700})
        await open_page(page, f"{demo_server.base_url}/#{conversation}")
        pictures, bubble = page.locator(".turn img"), page.locator(".bubble")
        await expect(pictures).to_have_count(2)
        assert [await each.get_attribute("src") for each in await pictures.all()] == urls
        boxes = [await each.bounding_box() for each in await pictures.all()]
        said = await bubble.bounding_box()
        assert said is not None
        first, second = [box for box in boxes if box is not None]
        assert first["x"] < second["x"] or first["y"] < second["y"]
        assert first["width"] >= 150
        assert second["y"] + second["height"] <= said["y"]
        assert said["width"] > 300
        await page.reload()


@pytest.mark.exhaustive
async def test_images_stay_with_the_draft_of_their_conversation(
    page: Page, demo_server: Served, api: httpx.AsyncClient
) -> None:
    first, second = [
        await make_conversation(api, [("user", "Hello!")], title=f"Images of {name}")
        for name in ("one", "another")
    ]
    await seeing(page)
    await open_page(page, demo_server.base_url)
    given = {"": ["new.png"], first: ["a.png", "b.png"], second: []}
    for conversation, files in given.items():
        await page.evaluate(f"location.hash = '#{conversation}'")
        await expect(page.locator("#tray img")).to_have_count(0)
        for number, name in enumerate(files, 1):
            await page.locator("#files").set_input_files([file(name)])
            await expect(page.locator("#tray img")).to_have_count(number)
    for is_reloaded in (False, True):
        for conversation, files in given.items():
            await page.evaluate(f"location.hash = '#{conversation}'")
            if is_reloaded:
                await page.reload()
                await connected(page)
            await expect(page.locator("#tray img")).to_have_count(len(files))
            assert await names(page) == files


@pytest.mark.exhaustive
async def test_an_image_that_is_late_finds_its_conversation(
    page: Page, demo_server: Served, api: httpx.AsyncClient
) -> None:
    """It is still being made smaller when the reader goes on."""
    conversation = await make_conversation(api, [("user", "Hello!")])
    await seeing(page)
    await page.add_init_script(
        """const open = window.createImageBitmap;
        window.createImageBitmap = (file) =>
          new Promise((resolve) => { window.release = () => resolve(open(file)); });"""
    )
    await open_page(page, demo_server.base_url)
    await page.locator("#files").set_input_files([file("a.png")])
    await page.evaluate(f"location.hash = '#{conversation}'")
    await expect(page.locator(".bubble")).to_be_visible()
    await page.evaluate("release()")
    await page.keyboard.press("Alt+n")
    await expect(page.locator("#tray img")).to_have_count(1)
    await page.go_back()
    await expect(page.locator(".bubble")).to_be_visible()
    await expect(page.locator("#tray img")).to_have_count(0)


async def test_a_refused_message_keeps_its_images(page: Page, demo_server: Served) -> None:
    """The conversation cannot be begun: text and images are in the message box again."""

    async def refuse(route: Route) -> None:
        body = json.dumps({"error": {"message": "The store is full.", "code": "full"}})
        if route.request.method != "POST":
            await route.continue_()
        else:
            await route.fulfill(status=503, content_type="application/json", body=body)

    await seeing(page)
    await page.route("**/v1/conversations", refuse)
    await open_page(page, demo_server.base_url)
    await page.locator("#files").set_input_files([file("a.png"), file("b.png", 1)])
    await expect(page.locator("#tray img")).to_have_count(2)
    await page.locator("#composer-text").fill("What are these?")
    await page.keyboard.press("Enter")
    await expect(page.locator("#refusal")).to_have_text("The store is full.")
    await expect(page.locator("#composer-text")).to_have_value("What are these?")
    assert await names(page) == ["a.png", "b.png"]


@pytest.mark.exhaustive
async def test_images_that_the_model_does_not_take(page: Page, demo_server: Served) -> None:
    """To send them again would be in vain, and is not offered; over a reload they are kept."""
    await seeing(page)
    await open_page(page, demo_server.base_url, max_output_tokens=8)
    await page.locator("#files").set_input_files([file("a.png")])
    await expect(page.locator("#tray img")).to_have_count(1)
    turn = await say(page, "Hello!")
    note = turn.locator(".is-error")
    await expect(note).to_contain_text("the model takes no images")
    await expect(note.get_by_role("button")).to_have_text(["Send without images"])
    await expect(turn.locator("img")).to_have_attribute("alt", "a.png")
    await page.reload()
    await connected(page)
    await expect(page.locator("#composer-text")).to_have_value("Hello!")
    assert await names(page) == ["a.png"]
    await page.keyboard.press("Enter")
    await note.get_by_role("button", name="Send without images").click()
    assert await finished(page.locator(".turn"))
    await expect(page.locator(".turn img")).to_have_count(0)


@pytest.mark.exhaustive
async def test_the_remove_button_hides_nothing(page: Page, demo_server: Served) -> None:
    await seeing(page)
    await open_page(page, demo_server.base_url)
    await page.locator("#files").set_input_files([file("a.png")])
    shown = await page.locator("#tray img").bounding_box()
    remove = page.get_by_role("button", name="Remove a.png")
    button = await remove.bounding_box()
    assert shown is not None
    assert button is not None
    assert shown["x"] + shown["width"] <= button["x"]
    await remove.click()
    await expect(page.locator("#tray")).to_be_hidden()


@pytest.mark.parametrize(
    ("takes_images", "accepted"), [(False, "takes text."), (True, "takes text and images.")]
)
@pytest.mark.exhaustive
async def test_a_file_that_is_neither_text_nor_image(
    page: Page, demo_server: Served, takes_images: bool, accepted: str
) -> None:
    """The page says what a message may have. Text that is dropped is text."""
    if takes_images:
        await seeing(page)
    await open_page(page, demo_server.base_url)
    for event, marks in (("dragover", 1), ("dragleave", 0)):
        await page.evaluate(
            """(name) => {
              const dataTransfer = new DataTransfer();
              dataTransfer.items.add(new File(["text"], "a.txt"));
              document.body.dispatchEvent(
                new DragEvent(name, { dataTransfer, bubbles: true, cancelable: true }));
            }""",
            event,
        )
        await expect(page.locator("#composer.is-over")).to_have_count(marks)
    for kind in ("drop", "paste"):
        given: list[Any] = [
            kind,
            base64.b64encode(b"\0\1").decode(),
            "notes.pdf",
            "application/pdf",
        ]
        await page.evaluate(_GIVE, given)
        expected = f"“notes.pdf” cannot be added: a message {accepted}"
        await expect(page.locator("#refusal")).to_have_text(expected)
        await page.keyboard.press("Alt+n")
    is_taken = await page.evaluate(
        """() => {
          const dataTransfer = new DataTransfer();
          dataTransfer.setData("text/plain", "Hello");
          return !document.getElementById("composer-text").dispatchEvent(
            new DragEvent("drop", { dataTransfer, bubbles: true, cancelable: true }));
        }"""
    )
    assert not is_taken


async def test_images_for_a_model_that_takes_none(page: Page, demo_server: Served) -> None:
    await open_page(page, demo_server.base_url)
    await page.evaluate(_GIVE, ["paste", base64.b64encode(picture(1)).decode()])
    await expect(page.locator("#refusal")).to_contain_text("takes no images")


@pytest.mark.exhaustive
async def test_files_are_sent_as_text_and_shown_as_files(
    page: Page, demo_server: Served, api: httpx.AsyncClient
) -> None:
    """Chosen ones, and a long text that is pasted; over a reload, and when a message is edited."""
    code = "print('```')\n<b>"
    await open_page(page, demo_server.base_url, max_output_tokens=5)
    await page.locator("#files").set_input_files(
        {"name": "a.py", "mimeType": "text/x-python", "buffer": f"{code}\r\n".encode()}
    )
    await page.evaluate(
        """() => {
          const clipboardData = new DataTransfer();
          clipboardData.setData("text/plain", "line\\n".repeat(1000));
          document.getElementById("composer-text").dispatchEvent(
            new ClipboardEvent("paste", { clipboardData, bubbles: true, cancelable: true }));
        }"""
    )
    tray = page.locator("#tray .file")
    await expect(tray.locator("b")).to_have_text(["a.py", "Pasted text.txt"])
    await expect(page.locator("#composer-text")).to_have_value("")
    await page.reload()
    await connected(page)
    await page.get_by_role("button", name="Remove Pasted text.txt").click()
    await expect(tray).to_have_count(1)
    turn = await say(page, "What is it?")
    await finished(turn)
    await expect(tray).to_have_count(0)
    for _ in range(2):
        await expect(turn.locator(".bubble")).to_have_text("What is it?")
        await turn.locator(".file summary").click()
        assert await turn.locator(".file pre").evaluate("pre => pre.textContent") == code
        await page.reload()
        await connected(page)
    tree = (await api.get(f"conversations/{conversation_of(page)}/tree?items=true")).json()
    texts = [part["text"] for part in tree["data"][0]["items"][0]["content"]]
    assert texts == [f"[File: a.py]\n````\n{code}\n````", "What is it?"]
    await turn.hover()
    await turn.get_by_role("button", name="Edit", exact=True).click()
    await page.get_by_role("textbox", name="Edit your message").fill("And this?")
    await page.keyboard.press("Enter")
    await expect(turn.locator(".bubble")).to_have_text("And this?")
    await expect(turn.locator(".file b")).to_have_text("a.py")
    await finished(turn)
