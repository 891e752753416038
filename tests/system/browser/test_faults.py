"""The chat page when something breaks: the answer on it is the one that nothing had disturbed.

Greedy, fp32, so that an answer is to be had twice.
"""

from __future__ import annotations

import asyncio
import contextlib
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
from playwright.async_api import TimeoutError as PlaywrightTimeoutError

from tests.redis_server import RedisServer

from ...support.toxic_proxy import ToxicProxy
from ..processes import Served, free_port, serve, suspended, wait_gone
from .conftest import NewPage
from .page_flow import (
    ENDLESS,
    STORY,
    ask,
    connected,
    finished,
    growing,
    open_page,
    say,
    stopped,
    stories,
)

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

_KEY = "sk-right!$"
_NUM_TOKENS = 1_200  # of the story that is broken
_FAST, _SLOW = 500_000, 20_000  # bytes per second; the slow one gives time to break it


@pytest.fixture(scope="module")
def undisturbed(demo_server: Served) -> str:
    body: dict[str, Any] = {"model": "demo", "input": STORY, "temperature": 0}
    body |= {"min_tokens": _NUM_TOKENS, "max_output_tokens": _NUM_TOKENS}
    response = httpx.post(f"{demo_server.base_url}/v1/responses", json=body, timeout=120).json()
    return str(response["output"][0]["content"][0]["text"])


@pytest_asyncio.fixture(loop_scope="module")
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


async def _same(page: Page, answer: str, undisturbed: str) -> None:
    """Word for word; how it is broken into lines is the page's."""
    assert answer.split() == undisturbed.split()
    await expect(page.locator("#banner")).to_be_hidden()
    assert "Nothing" not in await page.locator("#announcer").inner_text()


async def test_the_network_breaks_in_an_answer(
    page: Page, proxy: ToxicProxy, undisturbed: str
) -> None:
    await _open(page, proxy)
    story = await _slow_story(page, proxy)
    for num_chars in (40, 200, 400):
        await growing(story, num_chars)
        await proxy.refuse()
        proxy.reset_all()
        await expect(page.get_by_role("alert")).to_contain_text("connection to the server broke")
        await page.get_by_role("textbox", name="Your message").fill("kept while offline")
        await page.keyboard.press("Enter")
        await expect(page.locator("#obstacle")).to_contain_text("Not sent:")
        await expect(story.locator("> .assistant")).to_have_attribute("aria-busy", "true")
        proxy.accept()
        with contextlib.suppress(PlaywrightTimeoutError):  # the page may be quicker
            await page.get_by_role("button", name="Try now").click(timeout=2_000)
    proxy.downstream.rate_bytes_per_s = _FAST
    await _same(page, await finished(story), undisturbed)
    await expect(page.get_by_role("textbox")).to_have_value("kept while offline")
    assert await ask(page, "Hello!")


async def test_enter_without_a_server(page: Page, proxy: ToxicProxy) -> None:
    """It says why it does nothing, and tries to connect at once."""
    await open_page(page, f"http://127.0.0.1:{proxy.port}")
    await ask(page, "Hello!")
    await proxy.refuse()
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
    proxy.accept()
    await connected(page)
    await expect(obstacle).to_be_hidden()


async def test_a_line_that_is_dead_and_does_not_say_so(
    page: Page, proxy: ToxicProxy, undisturbed: str
) -> None:
    await _open(page, proxy)
    story = await _slow_story(page, proxy)
    await growing(story)
    proxy.downstream.is_black_hole = True
    await page.evaluate("dispatchEvent(new Event('offline'))")  # the system says so
    await expect(page.get_by_role("alert")).to_contain_text("connection to the server broke")
    proxy.downstream.is_black_hole = False
    proxy.downstream.rate_bytes_per_s = _FAST
    proxy.reset_all()
    await page.evaluate("dispatchEvent(new Event('online'))")
    await _same(page, await finished(story), undisturbed)


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
    await proxy.refuse()
    proxy.reset_all()
    await expect(page.get_by_role("alert")).to_be_visible()
    proxy.downstream.rate_bytes_per_s = _FAST
    proxy.accept()
    await _same(page, await finished(story), undisturbed)
    story = await _slow_story(page, proxy)
    await growing(story)
    await stopped(page, story)


async def test_a_page_that_is_loaded_anew_in_an_answer(
    page: Page, demo_server: Served, undisturbed: str
) -> None:
    await stories(page, _NUM_TOKENS)
    await open_page(page, demo_server.base_url, temperature=0)
    await growing(await say(page, STORY))
    await page.reload()
    await _same(page, await finished(page.locator(".turn")), undisturbed)
    await expect(page.locator(".bubble")).to_have_text(STORY)


async def test_the_engine_is_killed_in_an_answer(
    page: Page, long_model: tuple[str, ...], tmp_path: Path, undisturbed: str
) -> None:
    """The page says so, and that the answer will go on; and it does."""
    await stories(page, _NUM_TOKENS)
    with serve(*long_model, "--dtype", "float32", log=tmp_path / "log") as served:
        await open_page(page, served.base_url, temperature=0)
        connection, live = page.locator("#connection"), page.locator("#live")
        supervisor = psutil.Process(served.process.pid)
        story = await say(page, STORY)
        await growing(story)
        with suspended(supervisor):  # no other engine is started meanwhile
            served.child("penstock-engine").kill()
            await expect(live).to_contain_text("The model is restarting; your answer will go on.")
            await expect(connection).to_contain_text("Restarting…")
            await expect(page.locator("#announcer")).to_contain_text("The model is restarting")
            await expect(story.locator("> .assistant")).to_have_attribute("aria-busy", "true")
            half = await story.locator(".prose").inner_text()
        more = await growing(story, len(half) + 200)
        assert undisturbed.split()[: len(more.split()) - 1] == more.split()[:-1]
        await expect(connection).to_contain_text("Connected")
        await expect(live).to_contain_text("tokens/s")
        await stopped(page, story)


@pytest.mark.redis
async def test_the_server_is_restarted_in_an_answer(
    page: Page, long_model: tuple[str, ...], tmp_path: Path, undisturbed: str
) -> None:
    port = str(free_port())
    await stories(page, _NUM_TOKENS)
    with RedisServer(tmp_path / "redis") as redis:
        flags = (*long_model, "--dtype", "float32", "--port", port, "--redis-url", redis.url)
        with serve(*flags, log=tmp_path / "first") as served:
            await open_page(page, served.base_url, temperature=0)
            story = await say(page, STORY)
            await growing(story)
            served.process.kill()
            wait_gone(served.family)
            await expect(page.get_by_role("alert")).to_contain_text("server")
            half = await story.locator(".prose").inner_text()
            served.process.wait()
        assert len(half) < len(undisturbed)
        with serve(*flags, log=tmp_path / "second"):
            await connected(page)
            await _same(page, await finished(story), undisturbed)
            await page.reload()
            await connected(page)
            await _same(page, await finished(page.locator(".turn")), undisturbed)


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


async def test_a_server_that_has_forgotten_everything(page: Page, small_server: Served) -> None:
    await page.add_init_script(f"sessionStorage.setItem('penstock.apiKey', '{_KEY}')")
    await stories(page)
    await open_page(page, small_server.base_url)
    story = await say(page, STORY)
    await growing(story)
    small_server.child("penstock-gateway").kill()  # another starts; without Redis it knows nothing
    await finished(story)
    await expect(story).to_contain_text("no longer has this conversation")
    await page.get_by_role("button", name="Start anew with this message").click()
    await expect(page.locator(".is-error")).to_have_count(0)
    await growing(page.locator(".turn"))
    await stopped(page, page.locator(".turn"))
