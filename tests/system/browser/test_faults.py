"""The chat page when something breaks: the answer on it is the one that nothing had disturbed.

Greedy, fp32, so that an answer is to be had twice.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
import pytest_asyncio
from playwright.async_api import Locator, Page, WebSocketRoute, expect

from ...support.toxic_proxy import ToxicProxy
from ..processes import END_S, Served, serve, suspended
from .conftest import NewPage
from .page_flow import (
    ENDLESS,
    STORY,
    ask,
    connected,
    conversation_of,
    finished,
    growing,
    open_page,
    say,
    stopped,
    stories,
)

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="session")]

_KEY = "sk-right!$"
# The second from when the page has tried again.
_IS_OFFLINE = re.compile("connection to the server broke|Cannot reach the server")
_NUM_TOKENS = 600  # of the story that is broken
_FAST, _SLOW = 500_000, 20_000  # bytes per second; the slow one gives time to break it


@pytest.fixture(scope="module")
def undisturbed(demo_server: Served) -> str:
    return _story_of(demo_server, _NUM_TOKENS)


def _story_of(served: Served, num_tokens: int) -> str:
    """When nothing happens."""
    body: dict[str, Any] = {"model": "demo", "input": STORY, "temperature": 0}
    body |= {"min_tokens": num_tokens, "max_output_tokens": num_tokens}
    response = httpx.post(f"{served.base_url}/v1/responses", json=body, timeout=END_S).json()
    return str(response["output"][0]["content"][0]["text"])


@pytest_asyncio.fixture(loop_scope="session")
async def proxy(demo_server: Served) -> AsyncIterator[ToxicProxy]:
    address = urlsplit(demo_server.base_url)
    async with ToxicProxy(address.hostname or "", address.port or 0) as proxy:
        yield proxy


async def _slow_story(page: Page, proxy: ToxicProxy) -> Locator:
    """Its turn, on a page that has been loaded; it comes slowly until `_FAST` is set."""
    proxy.downstream.rate_bytes_per_s = _SLOW
    return await say(page, STORY)


@pytest.fixture(scope="module")
def small_server(
    long_model: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """One that asks for a key, and answers one at a time."""
    log = tmp_path_factory.mktemp("small") / "log"
    with serve(*long_model, "--api-key", _KEY, "--max-num-seqs", "1", log=log) as served:
        yield served


async def _open(page: Page, proxy: ToxicProxy) -> None:
    """The page through the proxy, which is quick until the story begins."""
    proxy.downstream.rate_bytes_per_s = _FAST
    await stories(page, _NUM_TOKENS)
    await open_page(page, f"http://127.0.0.1:{proxy.port}", temperature=0)


async def _is_undisturbed(text: str, served: Served) -> None:
    """It is the story's beginning, word for word; its last word may be cut."""
    story = await asyncio.to_thread(_story_of, served, len(text) // 2)
    assert len(story) > len(text), "a token has more than two letters"
    words = text.split()[:-1]
    assert story.split()[: len(words)] == words


async def _same(page: Page, answer: str, undisturbed: str) -> None:
    """Word for word; how it is broken into lines is the page's."""
    assert answer.split() == undisturbed.split()
    await expect(page.locator("#banner")).to_be_hidden()
    assert "Nothing" not in await page.locator("#announcer").inner_text()


@pytest.mark.exhaustive
async def test_the_network_breaks_in_an_answer(
    page: Page, proxy: ToxicProxy, undisturbed: str
) -> None:
    await _open(page, proxy)
    story = await _slow_story(page, proxy)
    for num_chars in (40, 200, 400):
        await growing(story, num_chars)
        proxy.refuse()
        proxy.reset_all()
        await expect(page.get_by_role("alert")).to_contain_text(_IS_OFFLINE)
        live = page.locator("#live")
        await expect(live).to_have_text("Not connected; your answer will go on. · Esc stops")
        await page.get_by_role("textbox", name="Your message").fill("kept while offline")
        await page.keyboard.press("Enter")
        await expect(page.locator("#obstacle")).to_contain_text("Not sent:")
        await expect(story.locator("> .assistant")).to_have_attribute("aria-busy", "true")
        proxy.accept()
        await page.locator("#banner-action").dispatch_event("click")  # the page may be quicker
    proxy.downstream.rate_bytes_per_s = _FAST
    await _same(page, await finished(story), undisturbed)
    await expect(page.get_by_role("textbox")).to_have_value("kept while offline")
    assert await ask(page, "Hello!")


@pytest.mark.exhaustive
async def test_enter_without_a_server(page: Page, proxy: ToxicProxy) -> None:
    """It says why it does nothing, and tries to connect at once. What needs no server is there,
    also what was not used before."""
    await open_page(page, f"http://127.0.0.1:{proxy.port}")
    await ask(page, "Hello!")
    await page.wait_for_function(
        """() => ["dialogs", "settings-dialog", "transfer", "token-view"].every((file) =>
          performance.getEntriesByType("resource").some((one) => one.name.includes(`/${file}.`)))"""
    )
    proxy.refuse()
    proxy.reset_all()
    await expect(page.get_by_role("alert")).to_be_visible()
    box, obstacle = page.locator("#composer-text"), page.locator("#obstacle")
    await box.fill("And now?")
    await box.press("Enter")
    await expect(obstacle).to_have_text(
        "Not sent: the server cannot be reached. Your message stays here."
    )
    await expect(box).to_have_value("And now?")
    await box.press("!")
    await expect(obstacle).to_be_hidden()
    await box.fill("")
    await box.press("ArrowUp")  # neither can a message be edited
    await expect(obstacle).to_be_visible()
    await page.keyboard.press("Alt+s")
    await page.get_by_role("button", name="Done").click()
    proxy.accept()
    await connected(page)
    await expect(obstacle).to_be_hidden()
    # What is opened without a connection comes with it.
    await page.keyboard.press("Alt+n")
    proxy.refuse()
    proxy.reset_all()
    await expect(page.get_by_role("alert")).to_be_visible()
    await page.go_back()
    log = page.get_by_role("log")
    await expect(log).to_have_attribute("aria-busy", "true")
    await expect(page.locator(".turn")).to_have_count(0)
    proxy.accept()
    await expect(page.locator(".turn")).to_have_count(1)
    await expect(log).to_have_attribute("aria-busy", "false")


@pytest.mark.exhaustive
async def test_a_line_that_is_dead_and_does_not_say_so(
    page: Page, proxy: ToxicProxy, undisturbed: str
) -> None:
    await _open(page, proxy)
    story = await _slow_story(page, proxy)
    await growing(story)
    proxy.downstream.is_black_hole = True
    await page.evaluate("dispatchEvent(new Event('offline'))")  # the system says so
    await expect(page.get_by_role("alert")).to_contain_text(_IS_OFFLINE)
    proxy.downstream.is_black_hole = False
    proxy.downstream.rate_bytes_per_s = _FAST
    proxy.reset_all()
    await page.evaluate("dispatchEvent(new Event('online'))")
    await _same(page, await finished(story), undisturbed)


@pytest.mark.exhaustive
async def test_without_websockets(page: Page, proxy: ToxicProxy, undisturbed: str) -> None:
    async def block(route: WebSocketRoute) -> None:
        await route.close()

    await page.route_web_socket(re.compile("/v1/responses"), block)
    await _open(page, proxy)
    # A route accepts before it closes: the page takes it for a connection that does not last.
    await page.add_init_script("delete window.WebSocket")
    await page.reload()
    await expect(page.locator("#connection")).to_contain_text("without WebSocket")
    story = await _slow_story(page, proxy)
    await growing(story, 200)
    proxy.refuse()
    proxy.reset_all()
    await expect(page.get_by_role("alert")).to_be_visible()
    proxy.downstream.rate_bytes_per_s = _FAST
    proxy.accept()
    await _same(page, await finished(story), undisturbed)
    story = await _slow_story(page, proxy)
    await growing(story)
    await stopped(page, story)


async def test_a_page_that_is_loaded_anew_in_an_answer(page: Page, demo_server: Served) -> None:
    await stories(page)
    await open_page(page, demo_server.base_url, temperature=0)
    half = await growing(await say(page, STORY))
    await page.reload()
    story = page.locator(".turn")
    await growing(story, len(half) + 200)
    await _is_undisturbed(await stopped(page, story), demo_server)
    await expect(page.locator(".bubble")).to_have_text(STORY)


@pytest.mark.exhaustive
@pytest.mark.process_kills
async def test_the_engine_is_killed_in_an_answer(
    page: Page, long_model: tuple[str, ...], tmp_path: Path
) -> None:
    """The page says so, and that the answer will go on; and it does."""
    await stories(page)
    with serve(*long_model, "--dtype", "float32", log=tmp_path / "log") as served:
        await open_page(page, served.base_url, temperature=0)
        connection, live = page.locator("#connection"), page.locator("#live")
        supervisor = psutil.Process(served.process.pid)
        story = await say(page, STORY)
        await growing(story)
        with suspended(supervisor):  # no other engine is started meanwhile
            served.child("penstock-engine").kill()
            await expect(live).to_contain_text("The model is restarting; your answer will go on")
            await expect(connection).to_contain_text("Restarting…")
            await expect(page.locator("#announcer")).to_contain_text("The model is restarting")
            await expect(story.locator("> .assistant")).to_have_attribute("aria-busy", "true")
            half = await story.locator(".prose").inner_text()
        more = await growing(story, len(half) + 200)
        await _is_undisturbed(more, served)
        await expect(connection).to_contain_text("Connected")
        await expect(live).to_contain_text("tokens/s")
        await stopped(page, story)


@pytest.mark.exhaustive
async def test_a_key_and_a_queue(new_page: NewPage, small_server: Served) -> None:
    page = await new_page()
    await page.goto(small_server.base_url)
    key = page.get_by_label("API key", exact=True)
    for wrong, message in (("no good", "cannot be sent"), ("sk-wrong", "did not accept")):
        await key.fill(wrong)
        await page.keyboard.press("Enter")
        await expect(page.locator("#key-error")).to_contain_text(message)
    await page.get_by_role("button", name="Not now").click()
    box = page.get_by_role("textbox", name="Your message")
    await box.fill("Hello!")
    await box.press("Enter")  # cannot be sent without a key
    await expect(key).to_be_focused()
    await page.get_by_role("button", name="Not now").click()
    await expect(box).to_be_focused()
    await expect(box).to_have_value("Hello!")
    await page.get_by_role("button", name="Enter key").click()
    await key.fill(_KEY)
    await page.get_by_role("button", name="Connect").click()
    await expect(page.get_by_role("dialog")).to_be_hidden()
    assert await ask(page, "Hello!")
    await page.reload()
    await connected(page)
    assert await page.evaluate("[localStorage.length, document.cookie]") == [0, ""]

    # With the one place taken, the page says how long the line is.
    body: dict[str, Any] = {"model": "demo", "input": STORY, "ignore_eos": True}
    body |= {"max_output_tokens": ENDLESS, "store": False}  # it ends with its reader
    async with httpx.AsyncClient(timeout=120, headers={"Authorization": f"Bearer {_KEY}"}) as api:
        url = f"{small_server.base_url}/v1/responses"
        async with api.stream("POST", url, json={**body, "stream": True}) as busy:
            lines = busy.aiter_lines()  # held: without it, the connection closes
            while "output_text.delta" not in await anext(lines):
                pass
            others = [asyncio.create_task(api.post(url, json=body)) for _ in range(4)]
            waiting = await say(page, "Hello!")
            await expect(page.locator("#live")).to_contain_text(re.compile(r"Waiting: (\d+|next)"))
            for other in others:
                other.cancel()
    await page.keyboard.press("Escape")
    await finished(waiting)


@pytest.mark.exhaustive
async def test_a_server_that_no_longer_has_the_conversation(
    page: Page, proxy: ToxicProxy, api: httpx.AsyncClient
) -> None:
    """It was deleted while the page could not reach the server."""
    await _open(page, proxy)
    story = await _slow_story(page, proxy)
    await growing(story)
    proxy.refuse()
    proxy.reset_all()
    await expect(page.get_by_role("alert")).to_contain_text(_IS_OFFLINE)
    (await api.delete(f"conversations/{conversation_of(page)}")).raise_for_status()
    proxy.downstream.rate_bytes_per_s = _FAST
    proxy.accept()
    await finished(story)
    await expect(story).to_contain_text("no longer has this conversation")
    await page.get_by_role("button", name="Start anew with this message").click()
    await expect(page.locator(".is-error")).to_have_count(0)
    assert await finished(page.locator(".turn"))
