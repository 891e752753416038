"""What the page shows because its server is this one: the place in the queue, how far the prompt is
computed, when an engine is back, tokens and their probabilities, versions beside each other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from playwright.async_api import Page, expect

from ..processes import END_S, Served, serve, suspended
from .conftest import violations
from .page_flow import (
    STORY,
    ask,
    choose,
    connected,
    conversation_of,
    finished,
    growing,
    open_page,
    say,
    stopped,
    stories,
)

pytestmark = [
    pytest.mark.browser,
    pytest.mark.exhaustive,
    pytest.mark.asyncio(loop_scope="session"),
]

_STATUSES = """
new MutationObserver(() => {
  for (const node of document.querySelectorAll(".turn .status")) {
    const text = node.firstChild?.textContent;
    if (text && statuses.at(-1) !== text) statuses.push(text);
  }
}).observe(document, { childList: true, subtree: true });
"""


@pytest.fixture(scope="module")
def slow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One that serves one request at a time, and computes a few tokens of a prompt in a step."""
    folder = tmp_path_factory.mktemp("slow")
    with serve(
        "--max-num-seqs", "1", "--max-num-batched-tokens", "32", "--dtype", "float32",
        log=folder / "log",
    ) as served:  # fmt: skip
        yield served


async def test_the_queue_and_the_prompt(page: Page, slow_server: Served) -> None:
    """In the answer: how many are before it, and then how much of its prompt is computed."""
    await page.add_init_script(f"window.statuses = []; {_STATUSES}")
    await open_page(page, slow_server.base_url, max_output_tokens=5)
    other = {"model": "demo", "prompt": STORY, "max_tokens": 1_500, "ignore_eos": True}
    async with (
        httpx.AsyncClient(base_url=slow_server.base_url, timeout=END_S) as client,
        client.stream("POST", "/v1/completions", json={**other, "stream": True}) as stream,
    ):
        lines = stream.aiter_lines()  # kept: without it, the stream is closed
        assert "text" in await anext(lines)
        waiting = await say(page, "Once upon a time there was a mill. " * 120)
        status = waiting.locator(".status")
        await expect(status).to_have_text(
            re.compile("^Waiting: (next in line|1 request is before)")
        )
    await finished(waiting)
    await expect(status).to_be_hidden()
    statuses = await page.evaluate("statuses")
    told = [text.replace(",", "") for text in statuses]
    shares = [re.match(r"Reading the prompt: (\d+) of (\d+) tokens", text) for text in told]
    counts = [(int(match[1]), int(match[2])) for match in shares if match]
    assert counts  # at most five a second, and a fast machine needs less
    assert counts == sorted(counts)
    assert all(0 < done < of for done, of in counts)
    async with httpx.AsyncClient(base_url=f"{slow_server.base_url}/v1/", timeout=END_S) as client:
        tree = (await client.get(f"conversations/{conversation_of(page)}/tree")).json()
        response = (await client.get(f"responses/{tree['head']}")).json()
    assert {of for _, of in counts} == {response["usage"]["input_tokens"]}


@pytest.mark.external
@pytest.mark.node
async def test_axe_finds_nothing_serious_in_any_of_it(
    page: Page, demo_server: Served, slow_server: Served, axe: str
) -> None:
    """Nor in an answer that was interrupted, presets, and the dialogs."""
    await stories(page)
    await open_page(page, demo_server.base_url, max_output_tokens=12, temperature=0, logprobs="on")
    await ask(page, "My name is Ada.")
    turn = page.locator(".turn").first
    await turn.get_by_role("button", name="Regenerate").click()
    await expect(turn.locator(".place")).to_have_text("2/2")
    await finished(turn)
    await turn.get_by_role("button", name="Versions beside each other").click()
    await expect(page.get_by_role("dialog").locator(".version")).to_have_count(2)
    assert await violations(page, axe) == []
    await page.keyboard.press("Escape")
    await growing(await say(page, STORY))
    await say(page, "Who are you?")
    await expect(page.locator(".turn").nth(1)).to_contain_text("Interrupted.")
    await growing(page.locator(".turn").nth(2), 4)
    await stopped(page, page.locator(".turn").nth(2))
    tokens = turn.get_by_role("button", name="Tokens and their probabilities")
    await tokens.click()
    await turn.locator(".token").nth(1).hover()
    await expect(turn.locator(".token-tip")).to_be_visible()
    assert await violations(page, axe) == []
    await page.keyboard.press("Alt+s")
    await page.get_by_label("System prompt").fill("Be brief.")
    await page.get_by_role("button", name="Save as preset").click()
    await page.get_by_label("Name of the preset").fill("Brief")
    assert await violations(page, axe) == []
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("button", name="Delete preset")).to_be_visible()
    assert await violations(page, axe) == []
    await page.get_by_role("button", name="Done").click()
    await choose(page.locator("#conversations li").first, "Rename")
    assert await violations(page, axe) == []
    await page.route("**/v1/conversations/conv_*", lambda route: route.abort())
    await page.keyboard.press("Enter")
    await expect(page.locator("#news-title")).to_have_text("This conversation was not renamed")
    assert await violations(page, axe) == []
    await page.unroute("**/v1/conversations/conv_*")
    await page.goto(slow_server.base_url)
    await connected(page)
    other = {"model": "demo", "prompt": STORY, "max_tokens": 1_500, "ignore_eos": True}
    async with (
        httpx.AsyncClient(base_url=slow_server.base_url, timeout=END_S) as client,
        client.stream("POST", "/v1/completions", json={**other, "stream": True}) as stream,
    ):
        lines = stream.aiter_lines()
        assert "text" in await anext(lines)
        waiting = await say(page, "Once upon a time there was a mill. " * 30)
        await expect(waiting.locator(".status")).to_contain_text("Waiting")
        assert await violations(page, axe) == []
    await finished(waiting)


async def test_an_estimate_follows_how_fast_the_queue_moves(
    page: Page, demo_server: Served
) -> None:
    """The server's is used until the queue has moved, and is no more exact than it can be."""
    await open_page(page, demo_server.base_url)
    texts = await page.evaluate(
        """async () => {
          const { QueueEstimate, queueText } = await import("./figures.js");
          const estimate = new QueueEstimate();
          const at = (position, estimatedWaitMs, now) =>
            queueText({ position }, estimate.note({ position, estimatedWaitMs }, now));
          return [at(9, 0, 0), at(9, 57_000, 500), at(8, 57_000, 1_000), at(6, 50_000, 3_000),
                  at(1, 40_000, 8_000), at(0, 0, 9_000)];
        }"""
    )
    assert texts == [
        "Waiting: 9 requests are before this one",
        "Waiting: 9 requests are before this one, about 60 s to go",
        "Waiting: 8 requests are before this one, about 10 s to go",
        "Waiting: 6 requests are before this one, about 10 s to go",
        "Waiting: 1 request is before this one, a few seconds to go",
        "Waiting: next in line",
    ]


@pytest.mark.process_kills
async def test_when_an_engine_is_back(page: Page, tmp_path: Path) -> None:
    """The answer says so while it waits for the engine, and goes on."""
    with serve("--dtype", "float32", log=tmp_path / "log") as served:
        await stories(page, 300)
        await open_page(page, served.base_url, temperature=0)
        turn = await say(page, STORY)
        await growing(turn)
        supervisor = psutil.Process(served.process.pid)
        status = turn.locator(".status")
        with suspended(supervisor):
            served.child("penstock-engine").kill()
            await expect(status).to_have_text(
                re.compile("your answer will go on, (in about [0-9]+ s|any moment now)[.]$")
            )
            async with httpx.AsyncClient(timeout=END_S) as client:
                health = await client.get(f"{served.base_url}/health")
            assert health.status_code == 503
            assert health.json()["error"]["penstock"]["estimated_wait_ms"] >= 0
        await finished(turn)
        await expect(status).to_be_hidden()


async def test_tokens_and_their_probabilities(page: Page, demo_server: Served) -> None:
    """Where the reader has switched them on, by pointing and by keys, also after a reload."""
    await open_page(page, demo_server.base_url, max_output_tokens=12, temperature=0)
    await ask(page, "Hello!")
    button = page.get_by_role("button", name="Tokens and their probabilities")
    await expect(button).to_have_count(0)
    await page.get_by_role("button", name="Settings").click()
    await page.get_by_label("how likely each token was").check()
    await page.get_by_role("button", name="Done").click()
    answer = await ask(page, "Who are you?")
    for _ in range(2):
        turn = page.locator(".turn").last
        await turn.get_by_role("button", name="Tokens and their probabilities").click()
        await expect(turn.locator(".prose")).to_be_hidden()
        tokens = turn.locator(".token")
        assert "".join(await tokens.all_text_contents()).split() == answer.split()
        tip = turn.locator(".token-tip")
        await expect(tip).to_be_hidden()
        await tokens.nth(1).hover()
        await expect(tip).to_be_visible()
        taken = tip.locator(".is-taken")
        await expect(taken).to_have_count(1)
        await expect(taken).to_contain_text("%")
        assert await tip.locator(".token-row").count() >= 5
        await page.mouse.move(0, 0)
        await expect(tip).to_be_hidden()
        await turn.locator(".token-text").focus()
        await page.keyboard.press("ArrowRight")
        await page.keyboard.press("ArrowRight")
        await expect(tokens.nth(1)).to_have_class(re.compile("is-chosen"))
        await expect(tip).to_be_visible()
        await turn.get_by_role("button", name="Tokens and their probabilities").click()
        await expect(turn.locator(".prose").last).to_be_visible()
        await page.reload()
        await expect(page.locator("#connection")).to_have_attribute("data-state", "open")


async def test_versions_beside_each_other(page: Page, demo_server: Served) -> None:
    await open_page(page, demo_server.base_url, max_output_tokens=12, temperature=0)
    first = await ask(page, "My name is Ada.")
    turn = page.locator(".turn").first
    await turn.hover()
    await turn.get_by_role("button", name="Edit", exact=True).click()
    await turn.get_by_role("textbox").fill("My name is Orlan.")
    await page.keyboard.press("Enter")
    await expect(turn.locator(".place")).to_have_text("2/2")
    second = await finished(page.locator(".turn").first)
    await turn.get_by_role("button", name="Versions beside each other").click()
    versions = page.get_by_role("dialog").locator(".version")
    await expect(versions).to_have_count(2)
    for version, question, answer in (
        (versions.first, "My name is Ada.", first),
        (versions.last, "My name is Orlan.", second),
    ):
        await expect(version.locator(".version-question")).to_have_text(question)
        assert await version.locator(".prose").inner_text() == answer
        await expect(version).to_contain_text(re.compile(r"\d+ tokens"))
    boxes = [await each.bounding_box() for each in (versions.first, versions.last)]
    assert boxes[0] is not None
    assert boxes[1] is not None
    assert boxes[0]["y"] == boxes[1]["y"]
    assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]
    await page.get_by_role("button", name="Go on with this one").click()
    await expect(page.locator("dialog.comparison")).to_have_count(0)
    await expect(turn.locator(".place")).to_have_text("1/2")
    assert await finished(page.locator(".turn").first) == first


async def test_why_not_more_of_the_prompt_was_cached(page: Page, demo_server: Served) -> None:
    """Beside the figures of an answer."""
    await open_page(page, demo_server.base_url, max_output_tokens=12, temperature=0)
    await ask(page, "My name is Ada.")
    await ask(page, "What is my name?")
    await page.get_by_role("button", name="Settings").click()
    await page.get_by_label("System prompt").fill("Be brief.")
    await page.get_by_role("button", name="Done").click()
    await ask(page, "And again?")
    said = []
    for number in range(3):
        turn = page.locator(".turn").nth(number)
        await turn.get_by_role("button", name="Figures").click()
        await expect(turn.locator(".counts")).to_be_attached()
        said.append(await turn.locator(".counts").inner_text())
    assert said[0] in ("", "none, as this is the first message of the chat")
    assert re.match(r"the other [\d,]+ are new|not more, as what was known", said[1])
    assert said[2] == "not more, as model, system prompt or tools differ from the turn before"
