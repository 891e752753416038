"""What is chosen beside the message and kept with its chat; and how full its context is."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from playwright.async_api import Page, Route, expect

from ..processes import NUM_CONTEXT_TOKENS, Served
from .page_flow import connected, conversation_of, finished, open_page, say

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="session")]


@pytest.mark.exhaustive
async def test_choices_are_kept_with_the_conversation(page: Page, demo_server: Served) -> None:
    """Model, thinking, tools, system prompt and sampling, each as long as the prompt may be."""
    sent: list[str] = []
    page.on("websocket", lambda socket: socket.on("framesent", lambda text: sent.append(text)))

    async def add_adapter(route: Route) -> None:
        models = await (await route.fetch()).json()
        models["data"].append({**models["data"][0], "id": "demo-adapter"})
        await route.fulfill(json=models)

    def asked() -> dict[str, Any]:
        return next(body for each in sent[::-1] if "input" in (body := json.loads(each)))

    prompt = "Be brief – 日本語. " * 60
    await page.route("**/v1/models", add_adapter)
    await open_page(page, demo_server.base_url, max_output_tokens=5)
    model = page.get_by_label("Model of this chat")
    thinking, tools = page.get_by_label("Thinking"), page.get_by_role("button", name="Tools")
    await expect(model).to_have_value("demo")
    await expect(thinking).to_have_value("")
    await thinking.select_option("Thinks a lot")
    await tools.click()
    await page.get_by_role("button", name="Settings").click()
    await page.get_by_label("System prompt").fill(prompt)
    await page.get_by_label("Temperature").fill("0.5")
    await page.get_by_role("button", name="Done").click()
    await finished(await say(page, "Hello!"))
    assert asked()["reasoning"] == {"effort": "high"}
    assert len(asked()["tools"]) == 3
    first = conversation_of(page)
    gauge = page.locator(".gauge")
    label = re.compile(rf"^[\d,]+ of {NUM_CONTEXT_TOKENS:,} tokens of context$")
    await expect(gauge).to_have_attribute("aria-label", label)

    await page.keyboard.press("Alt+n")
    await expect(gauge).to_have_count(0)
    await expect(thinking).to_have_value("high")  # as it was chosen last
    await thinking.select_option("No thinking")
    await tools.click()
    await page.get_by_role("button", name="Settings").click()
    await page.get_by_label("System prompt").fill("")
    await page.get_by_role("button", name="Done").click()
    for _ in range(2):
        await page.evaluate(f"location.hash = '#{first}'")
        await expect(thinking).to_have_value("high")
        await expect(tools).to_have_attribute("aria-pressed", "true")
        await expect(gauge).to_have_attribute("aria-label", label)
        await page.reload()
        await connected(page)
    await page.get_by_role("button", name="Settings").click()
    await expect(page.get_by_label("System prompt")).to_have_value(prompt)
    await expect(page.get_by_label("Temperature")).to_have_value("0.5")
    await page.get_by_role("button", name="Done").click()
    async with page.expect_response(f"**/conversations/{first}"):
        await model.select_option("demo-adapter")
    await page.keyboard.press("Alt+n")
    await page.evaluate(f"location.hash = '#{first}'")
    await expect(model).to_have_value("demo-adapter")


@pytest.mark.exhaustive
async def test_presets_and_all_of_sampling(page: Page, demo_server: Served) -> None:
    """A preset has the system prompt and the sampling, under a name, over a reload; what is chosen
    is sent."""
    sent: list[str] = []
    page.on("websocket", lambda socket: socket.on("framesent", lambda text: sent.append(text)))
    await open_page(page, demo_server.base_url, max_output_tokens=5)
    await page.get_by_role("button", name="Settings").click()
    preset = page.get_by_label("Preset", exact=True)
    await expect(preset).to_have_value("")  # the limit of this test is its own
    values = {
        "Top k": "40", "Frequency penalty": "0.5", "Presence penalty": "-0.25",
        "Repetition penalty": "1.1", "Seed": "7", "Temperature": "0.7", "Top n sigma": "1.5",
        "Min tokens": "2", "Tokens of thoughts": "9",
    }  # fmt: skip
    more = page.get_by_text("More sampling")
    await expect(page.get_by_label("Seed")).to_be_hidden()
    await more.click()
    for label, value in values.items():
        await page.get_by_label(label).fill(value)
    await page.get_by_label("Stop at").fill("END\nSTOP\n")
    await page.get_by_label("System prompt").fill("Be brief.")
    await page.get_by_role("button", name="Save as preset…").click()
    name = page.get_by_label("Name of the preset")
    await expect(name).to_be_focused()
    await name.fill("Mine")
    await page.keyboard.press("Enter")
    await expect(preset).to_have_value("Mine")
    await preset.select_option("Exact")
    await expect(page.get_by_label("Temperature")).to_have_value("0")
    for label in ("Top k", "System prompt", "Stop at"):
        await expect(page.get_by_label(label)).to_have_value("")
    await page.get_by_role("button", name="Done").click()
    await page.reload()
    await connected(page)
    await page.get_by_role("button", name="Settings").click()
    await expect(preset).to_have_value("Exact")
    await preset.select_option("Mine")
    await expect(more).to_have_text("More sampling · 8 set")
    for label, value in values.items():
        await expect(page.get_by_label(label)).to_have_value(value)
    await page.get_by_role("button", name="Done").click()
    await finished(await say(page, "Hello!"))
    asked = next(body for each in sent[::-1] if "input" in (body := json.loads(each)))
    wanted = {
        "top_k": 40, "frequency_penalty": 0.5, "presence_penalty": -0.25, "temperature": 0.7,
        "repetition_penalty": 1.1, "seed": 7, "stop": ["END", "STOP"], "instructions": "Be brief.",
        "max_output_tokens": 5, "top_n_sigma": 1.5, "min_tokens": 2, "thinking_token_budget": 9,
    }  # fmt: skip
    assert {name: asked.get(name) for name in wanted} == wanted
    await page.get_by_role("button", name="Settings").click()
    await page.get_by_role("button", name="Delete preset").click()
    await expect(preset.locator("option", has_text="Mine")).to_have_count(0)
    await expect(preset).to_have_value("")
    await expect(page.get_by_label("Top k")).to_have_value("40")
