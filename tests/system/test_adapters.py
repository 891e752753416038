"""Adapters in a whole server: loaded, replaced and unloaded, and their streams are PEFT's."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.async_api import async_playwright, expect

from penstock.engine.lora.files import WEIGHTS_FILE
from tests.support.peft_models import PeftAnswers, write_adapter

from .browser.page_flow import CHROMIUM_ARGS, STORY, conversation_of, open_page, say
from .browser.page_flow import finished as finished_on_page
from .processes import END_S, ENDLESS_TOKENS, Served, serve

pytestmark = pytest.mark.exhaustive

NUM_TOKENS = 60
PROMPT = list(range(20, 60))
NAMES = ("first", "second", "third")
BODY = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def paths(long_model: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters of the demo model."""
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(NAMES):
        write_adapter(Path(long_model[0]), root / name, seed, std=0.05)
    return {name: root / name for name in NAMES}


@pytest.fixture(scope="module")
def expected(long_model: tuple[str, ...], paths: Mapping[str, Path]) -> dict[str, list[int]]:
    """PEFT's tokens, of the base model's too."""
    answers, base = PeftAnswers(), Path(long_model[0])
    found = {name: answers(base, paths.get(name), PROMPT, NUM_TOKENS) for name in (*NAMES, "demo")}
    assert len(set(map(tuple, found.values()))) == 4
    return found


@pytest.fixture(scope="module")
def server(
    long_model: tuple[str, ...], paths: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    log = tmp_path_factory.mktemp("server") / "log"
    adapter = ("--enable-lora", "--lora-modules", f"first={paths['first']}")
    with serve(*long_model, "--dtype", "float32", *adapter, log=log) as served:
        yield served


class Stream:
    """A completion as it comes."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.error: dict[str, Any] | None = None
        self.has_begun = asyncio.Event()

    async def read(self, http: httpx.AsyncClient, model: str, **more: Any) -> Stream:
        body = {**BODY, "model": model, "stream": True, "return_token_ids": True, **more}
        async with http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    self._take(json.loads(line.removeprefix("data: ")))
        return self

    def _take(self, chunk: dict[str, Any]) -> None:
        self.error = chunk.get("error", self.error)
        for choice in chunk.get("choices", ()):
            self.token_ids += choice.get("token_ids") or ()
            if len(self.token_ids) > 3:
                self.has_begun.set()


@pytest.fixture
async def http(server: Served) -> Any:
    async with httpx.AsyncClient(base_url=server.base_url, timeout=END_S) as client:
        yield client


async def load(http: httpx.AsyncClient, name: str, path: Path, **more: Any) -> None:
    body = {"lora_name": name, "lora_path": str(path), **more}
    response = await http.post("/v1/load_lora_adapter", json=body)
    assert response.is_success, response.text


async def test_adapters_are_models_whose_streams_run_beside_each_other(
    http: httpx.AsyncClient, paths: Mapping[str, Path], expected: Mapping[str, list[int]]
) -> None:
    for name in ("second", "third"):
        await load(http, name, paths[name])
    listed = (await http.get("/v1/models")).json()["data"]
    assert [(card["id"], card.get("parent")) for card in listed] == [
        ("demo", None), *((name, "demo") for name in NAMES)
    ]  # fmt: skip
    streams = await asyncio.gather(*(Stream().read(http, name) for name in expected))
    for name, stream in zip(expected, streams, strict=True):
        assert stream.token_ids == expected[name]


async def test_an_unloaded_adapters_streams_end_by_name(
    http: httpx.AsyncClient, paths: Mapping[str, Path], expected: Mapping[str, list[int]]
) -> None:
    await load(http, "leaving", paths["second"])
    streams = {name: Stream() for name in ("leaving", "first")}
    async with asyncio.timeout(END_S), asyncio.TaskGroup() as tasks:
        for name, stream in streams.items():
            max_tokens = ENDLESS_TOKENS if name == "leaving" else NUM_TOKENS
            tasks.create_task(stream.read(http, name, max_tokens=max_tokens))
        await streams["leaving"].has_begun.wait()
        await http.post("/v1/unload_lora_adapter", json={"lora_name": "leaving"})
    error = streams["leaving"].error
    assert error is not None
    assert error["message"] == "the adapter 'leaving' was unloaded"
    assert len(streams["leaving"].token_ids) < ENDLESS_TOKENS
    assert streams["first"].error is None
    assert streams["first"].token_ids == expected["first"]
    response = await http.post("/v1/completions", json={**BODY, "model": "leaving"})
    assert response.status_code == 404


async def test_another_adapter_under_a_name_answers_at_once(
    http: httpx.AsyncClient,
    paths: Mapping[str, Path],
    expected: Mapping[str, list[int]],
    tmp_path: Path,
) -> None:
    """Also at the same place on disk, with the old one's KV in the cache."""
    place = tmp_path / "adapter"
    shutil.copytree(paths["second"], place)
    await load(http, "mine", place)
    assert (await Stream().read(http, "mine")).token_ids == expected["second"]
    shutil.copytree(paths["third"], place, dirs_exist_ok=True)
    await load(http, "mine", place, load_inplace=True)
    assert (await Stream().read(http, "mine")).token_ids == expected["third"]
    (place / WEIGHTS_FILE).write_bytes(b"damaged")
    body = {"lora_name": "damaged", "lora_path": str(place)}
    response = await http.post("/v1/load_lora_adapter", json=body)
    assert response.status_code == 400
    assert WEIGHTS_FILE in response.json()["error"]["message"]
    assert (await Stream().read(http, "mine")).token_ids == expected["third"]


@pytest.mark.browser
async def test_the_page_offers_adapters(server: Served, http: httpx.AsyncClient) -> None:
    path = shutil.which("chromium") or pytest.skip("chromium is not installed")
    listed = [card["id"] for card in (await http.get("/v1/models")).json()["data"]]
    assert listed[:2] == ["demo", "first"]
    question: dict[str, Any] = {"input": STORY, "temperature": 0, "max_output_tokens": 40}
    answers = {
        name: (await http.post("/v1/responses", json={"model": name, **question})).json()["output"]
        for name in listed[:2]
    }
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=CHROMIUM_ARGS)
        page = await browser.new_page()
        await open_page(page, server.base_url, temperature=0, max_output_tokens=40)
        choice = page.get_by_label("Model", exact=True)
        for name in ("demo", "first"):
            await page.get_by_role("button", name="Settings").click()
            await expect(choice.locator("option")).to_have_text(listed)
            await choice.select_option(name)
            await page.get_by_role("button", name="Done").click()
            await expect(page.locator("#model")).to_have_text(name)
            await page.get_by_role("button", name="New chat").click()
            await finished_on_page(await say(page, STORY))
            tree = (await http.get(f"/v1/conversations/{conversation_of(page)}/tree")).json()
            response = (await http.get(f"/v1/responses/{tree['head']}")).json()
            assert response["model"] == name
            assert _texts(response["output"]) == _texts(answers[name])
        await browser.close()
    assert _texts(answers["demo"]) != _texts(answers["first"])


def _texts(output: list[dict[str, Any]]) -> list[str]:
    return [part["text"] for item in output for part in item.get("content") or ()]
