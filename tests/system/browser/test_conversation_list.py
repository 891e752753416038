"""The list of conversations beside the chat: its order, its length, and what it says of them."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from playwright.async_api import Page, Route, expect

from tests.redis_server import RedisServer

from ..processes import Served, serve
from .conftest import make_conversation
from .page_flow import ask, conversation_of, open_page

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="session")]

_IDS = "nodes => nodes.map(node => node.dataset.id)"


async def listed(page: Page) -> list[str]:
    ids: list[str] = await page.locator("#conversations a").evaluate_all(_IDS)
    return ids


async def many(page: Page, number: int) -> None:
    """The server lists so many conversations, of which a request gets a hundred at most."""
    made = [
        {
            "id": f"conv_{index}",
            "created_at": 1_700_000_000,
            "metadata": {"title": f"Number {index}"},
        }
        for index in range(number)
    ]
    ids = [str(each["id"]) for each in made]

    async def answer(route: Route) -> None:
        query = parse_qs(urlsplit(route.request.url).query)
        start = ids.index(query["after"][0]) + 1 if "after" in query else 0
        end = start + min(100, int(query["limit"][0]))
        await route.fulfill(json={"data": made[start:end], "has_more": end < number})

    await page.route("**/v1/conversations?*", answer)


@pytest.mark.exhaustive
async def test_without_redis_it_promises_nothing_over_a_restart(
    page: Page, demo_server: Served
) -> None:
    await open_page(page, demo_server.base_url)
    sidebar = page.get_by_role("complementary", name="Conversations")
    await expect(sidebar).to_contain_text("Kept until the server restarts.")
    await expect(sidebar).not_to_contain_text("saved", ignore_case=True)


@pytest.mark.redis
@pytest.mark.exhaustive
async def test_with_redis_conversations_are_saved(
    page: Page, long_model: tuple[str, ...], tmp_path: Path
) -> None:
    with (
        RedisServer(tmp_path) as redis,
        serve(*long_model, "--redis-url", redis.url, log=tmp_path / "log") as served,
    ):
        await open_page(page, served.base_url)
        await expect(page.locator("#sidebar")).to_contain_text("Saved in this server’s Redis.")


@pytest.mark.exhaustive
async def test_the_conversation_that_is_used_moves_up(
    page: Page, demo_server: Served, api: httpx.AsyncClient
) -> None:
    """At once, and as the server lists them afterwards."""
    made = {await make_conversation(api, [("user", "Hello")], title=title) for title in "AB"}
    # Those of one second are in the order of their ids: the one to use is the one listed below.
    top, used = [one["id"] for one in (await api.get("conversations?limit=2")).json()["data"]]
    assert {top, used} == made
    await open_page(page, f"{demo_server.base_url}/#{used}", max_output_tokens=5)
    await expect(page.locator(f"a[data-id={used}]")).to_be_visible()
    assert (await listed(page))[:2] == [top, used]
    created = (await api.get(f"conversations/{top}")).json()["created_at"]
    await page.wait_for_function("second => Date.now() / 1000 >= second + 1", arg=created)
    await ask(page, "Hello!")
    assert (await listed(page))[:2] == [used, top]
    await page.reload()
    await expect(page.locator(f"a[data-id={used}]")).to_be_visible()
    assert (await listed(page))[:2] == [used, top]


async def test_the_oldest_of_many_is_reached_by_scrolling(page: Page, demo_server: Served) -> None:
    """By two movements to the end of what is there."""
    await many(page, 205)
    await open_page(page, demo_server.base_url)
    links = page.locator("#conversations a")
    await expect(links).to_have_count(30)
    await page.locator("#conversations").hover()
    await page.mouse.wheel(0, 100_000)
    await expect(links).to_have_count(205)
    await page.mouse.wheel(0, 100_000)
    await expect(links.last).to_be_in_viewport()
    await expect(links.last).to_have_text("Number 204")
    await expect(page.locator("#more-conversations")).to_be_hidden()


@pytest.mark.exhaustive
async def test_a_message_leaves_the_list_as_long_as_it_is(page: Page, demo_server: Served) -> None:
    await many(page, 205)
    await open_page(page, demo_server.base_url, max_output_tokens=5)
    links = page.locator("#conversations a")
    await expect(links).to_have_count(30)
    await page.locator("#conversations").hover()
    await page.mouse.wheel(0, 100_000)
    await expect(links).to_have_count(205)
    async with page.expect_response("**/v1/conversations?*"):
        await ask(page, "Hello!")
    assert conversation_of(page)
    async with page.expect_response(lambda answer: "after=conv_199" in answer.url):
        await page.evaluate("new BroadcastChannel('penstock').postMessage({})")  # as another tab
    await page.evaluate("new Promise(requestAnimationFrame)")
    await expect(links).to_have_count(205)
