"""The dashboard against the real engine under load: what it says is what `/metrics` says."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import httpx
import psutil
import pytest
import pytest_asyncio
from playwright.async_api import Page, expect
from prometheus_client.parser import text_string_to_metric_families

from penstock.gateway.api.status.stats_socket import series_of

from ..processes import Served, serve, suspended
from .conftest import SCHEMES

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="session")]

KEYS = """
[[keys]]
key = "sk-web"
tenant = "web"
admin = true

[[keys]]
key = "sk-batch"
tenant = "batch"

[tenants.web]
[tenants.batch]
"""
# So little memory that the load below is preempted and swapped.
SMALL = (
    "--num-blocks", "48", "--num-host-blocks", "24", "--max-model-len", "512",
    "--max-num-seqs", "8", "--preemption", "swap",
)  # fmt: skip


@pytest.fixture(scope="module")
def loaded_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One with two tenants and little memory."""
    folder = tmp_path_factory.mktemp("dashboard")
    keys = folder / "keys.toml"
    keys.write_text(KEYS)
    with serve(*SMALL, "--api-keys-file", str(keys), log=folder / "log") as served:
        yield served


@pytest_asyncio.fixture(loop_scope="session")
async def client(loaded_server: Served) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=loaded_server.base_url, timeout=60) as client:
        yield client


async def complete(client: httpx.AsyncClient, key: str, *, num: int, max_tokens: int = 150) -> None:
    """As many requests at once; each prompt is half new and half as the others'."""

    async def one(index: int) -> None:
        body = {
            "model": "demo",
            "prompt": "Once upon a time there was a mill. " * 6 + f"Its number was {index}. " * 4,
            "max_tokens": max_tokens,
            "ignore_eos": True,
        }
        headers = {"Authorization": f"Bearer {key}"}
        (await client.post("/v1/completions", json=body, headers=headers)).raise_for_status()

    await asyncio.gather(*map(one, range(num)))


async def keep_loaded(client: httpx.AsyncClient, was_seen: asyncio.Event) -> None:
    """Many requests of both tenants, again and again until they were seen, and the memory did not
    suffice for them."""
    series: Mapping[str, float] = {}
    while not (
        was_seen.is_set()
        and series["num_preemptions_total"] > 0
        and series["prefix_cache_hits_total"] > 0
    ):
        await asyncio.gather(
            complete(client, "sk-web", num=18), complete(client, "sk-batch", num=6, max_tokens=60)
        )
        series = await scraped(client)


async def predict(client: httpx.AsyncClient) -> None:
    """An answer that is as predicted, but for a word."""
    body = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 60, "temperature": 0}
    headers = {"Authorization": "Bearer sk-web"}
    answer = await client.post("/v1/completions", json=body, headers=headers)
    text = answer.json()["choices"][0]["text"].replace(" the", " no", 1)
    body["prediction"] = {"type": "content", "content": text}
    (await client.post("/v1/completions", json=body, headers=headers)).raise_for_status()


async def scraped(client: httpx.AsyncClient) -> dict[str, float]:
    metrics = await client.get("/metrics", headers={"Authorization": "Bearer sk-web"})
    return series_of(text_string_to_metric_families(metrics.text))


async def sign_in(page: Page, base_url: str) -> None:
    await page.goto(f"{base_url}/dashboard")
    for key, said in (("sk-wrong", "did not accept"), ("sk-web", "")):
        await page.get_by_role("textbox", name="API key").fill(key)
        await page.keyboard.press("Enter")
        if said:
            await expect(page.locator("#key-error")).to_contain_text(said)
    await expect(page.locator("#connection")).to_have_attribute("data-state", "open")
    await expect(page.locator("#key-dialog")).to_be_hidden()


def quantile(series: Mapping[str, float], name: str, share: float) -> float:
    """As PromQL's `histogram_quantile` has it."""
    buckets = sorted(
        (float(key.split('"')[1]), value)
        for key, value in series.items()
        if key.startswith(f"{name}_bucket{{")
    )
    rank = share * buckets[-1][1]
    below, num_below = 0.0, 0.0
    for bound, num in buckets:
        if num >= rank:
            if math.isinf(bound):
                return below
            return below + (bound - below) * (rank - num_below) / (num - num_below)
        below, num_below = bound, num
    raise AssertionError("the last bucket has them all")


def seconds(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"ms": 1e-3, "s": 1.0}[unit]


def percent(text: str) -> float:
    return float(text.removesuffix(" %"))


async def expect_numbers(page: Page, series: Mapping[str, float]) -> None:
    """Everything on the page that does not depend on when one looks."""
    for tier in ("device", "host"):
        for state in ("used", "cached", "free"):
            number = series[f'kv_blocks{{state="{state}",tier="{tier}"}}']
            place = page.locator(f"#{tier}-blocks .legend .{state} dd")
            await expect(place).to_have_text(re.compile(rf"^{number:,.0f} · "))
    for tile, name in {
        "running": "num_requests_running",
        "waiting": "num_requests_waiting",
        "swapped": "num_requests_swapped",
    }.items():
        await expect(page.locator(f"#tile-{tile} b")).to_have_text(f"{series[name]:,.0f}")
    for tile, name in {
        "preemptions": "num_preemptions_total",
        "ttft": "time_to_first_token_seconds_count",
        "itl": "inter_token_latency_seconds_count",
        "tokens-out": "generation_tokens_total",
        "tokens-in": "prompt_tokens_total",
        "step": "engine_steps_total",
    }.items():
        note = page.locator(f"#tile-{tile} .note")
        await expect(note).to_contain_text(re.compile(rf"(^| )total: {series[name]:,.0f}($| )"))


async def expect_usage(page: Page, client: httpx.AsyncClient) -> None:
    """What each key has used today, as `/v1/usage` says."""
    headers = {"Authorization": "Bearer sk-web"}
    today = (await client.get("/v1/usage", headers=headers)).json()["data"][-1]
    assert {each["project_id"] for each in today["results"]} == {"web", "batch"}
    for each in today["results"]:
        row = page.locator("#usage").get_by_role("row", name=each["api_key_id"])
        await expect(row.locator("td").nth(0)).to_have_text(f"{each['num_model_requests']:,}")
        await expect(row.locator("td").nth(1)).to_have_text(f"{each['input_tokens']:,}")
        await expect(row.locator("td").nth(3)).to_have_text(f"{each['output_tokens']:,}")


async def expect_tenants(page: Page, series: Mapping[str, float]) -> None:
    totals = {
        tenant: sum(
            series[f'tenant_{kind}_tokens_total{{tenant="{tenant}"}}']
            for kind in ("prompt", "generation")
        )
        for tenant in ("web", "batch")
    }
    for tenant, total in totals.items():
        row = page.locator("#tenants").get_by_role("row", name=tenant)
        await expect(row.locator("td").last).to_have_text(f"{total:,.0f}")
        said = await row.locator(".share span").inner_text()
        assert percent(said) == pytest.approx(100 * total / sum(totals.values()), abs=0.51)


@pytest.mark.exhaustive
async def test_what_it_says_is_what_the_metrics_say(
    page: Page, loaded_server: Served, client: httpx.AsyncClient
) -> None:
    await sign_in(page, loaded_server.base_url)
    await page.get_by_label("Averages over").select_option("300")  # everything since now
    await expect_numbers(page, await scraped(client))
    await expect(page.locator("#more-tenants")).to_have_text("No tokens for anybody yet.")
    await expect(page.locator("#tile-drafts")).to_be_hidden()  # there are none
    picture = page.get_by_role("img", name="KV on the device")
    await expect(picture).to_have_attribute("aria-label", re.compile("48 blocks 0 in use"))
    assert await picture.locator(".used").get_attribute("d") == ""

    was_seen = asyncio.Event()
    load = asyncio.create_task(keep_loaded(client, was_seen))
    used = re.compile(r"blocks [1-9]\d* in use")
    await expect(picture).to_have_attribute("aria-label", used)
    await expect(picture.locator(".used")).to_have_attribute("d", re.compile("^M0 0h"))
    await expect(page.locator("#tile-running b")).to_have_text(re.compile("[1-8]"))
    was_seen.set()
    await load
    await predict(client)

    series = await scraped(client)
    await expect_numbers(page, series)
    await expect_tenants(page, series)
    await expect_usage(page, client)
    hits = series["prefix_cache_hits_total"] / series["prefix_cache_queries_total"]
    said = await page.locator("#tile-hits b").inner_text()
    assert percent(said) == pytest.approx(100 * hits, abs=0.51)
    num_drafted = series["spec_decode_num_draft_tokens_total"]
    num_right = series["spec_decode_num_accepted_tokens_total"]
    note = page.locator("#tile-drafts .note")
    await expect(note).to_contain_text(f"total: {num_drafted:,.0f}, {num_right:,.0f} right")
    said = await page.locator("#tile-drafts b").inner_text()
    assert percent(said) == pytest.approx(100 * num_right / num_drafted, abs=0.51)
    for tile, name in {"ttft": "time_to_first_token", "itl": "inter_token_latency"}.items():
        for index, share in enumerate((0.5, 0.99)):
            text = await page.locator(f"#tile-{tile} .number-{index} b").inner_text()
            wanted = quantile(series, f"{name}_seconds", share)
            assert seconds(text) == pytest.approx(wanted, rel=0.01, abs=0.0006)
    assert re.match(r"M\d", await page.locator("#tile-tokens-out .line").get_attribute("d") or "")


@pytest.mark.process_kills
@pytest.mark.exhaustive
async def test_it_goes_on_after_gateway_and_engine_were_killed(
    page: Page, loaded_server: Served, client: httpx.AsyncClient
) -> None:
    await sign_in(page, loaded_server.base_url)
    state = page.locator("#connection")
    supervisor = psutil.Process(loaded_server.process.pid)
    with suspended(supervisor):  # what dies is away for as long as we look
        loaded_server.child("penstock-gateway").kill()
        await expect(state).to_have_attribute("data-state", "waiting")
        await expect(page.locator("#banner")).to_contain_text("from before")
    await expect(state).to_have_attribute("data-state", "open")
    await expect(page.locator("#banner")).to_be_hidden()
    await complete(client, "sk-web", num=2)
    await expect_numbers(page, await scraped(client))

    with suspended(supervisor):
        loaded_server.child("penstock-engine").kill()
        await expect(state).to_have_attribute("data-state", "no-engine")
    await expect(state).to_have_attribute("data-state", "open")
    await complete(client, "sk-web", num=2)
    await expect_numbers(page, await scraped(client))


@pytest.mark.node
@pytest.mark.external
async def test_axe_finds_nothing_on_a_narrow_screen(
    page: Page, loaded_server: Served, client: httpx.AsyncClient, axe: str
) -> None:
    """With requests that run, and a fault."""
    await page.set_viewport_size({"width": 390, "height": 760})
    await sign_in(page, loaded_server.base_url)
    await client.post("/v1/completions", json={"model": "none"})
    load = asyncio.create_task(
        keep_loaded(client, asyncio.Event())
    )  # as long as the page is looked at
    await expect(page.locator("#running tr").first).to_be_visible()
    await expect(page.locator("#errors tr").first).to_be_visible()
    await page.evaluate(axe)
    for scheme in SCHEMES:
        await page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        found: dict[str, Any] = await page.evaluate("axe.run()")
        assert [(v["id"], [n["target"] for n in v["nodes"]]) for v in found["violations"]] == []
    width = await page.evaluate("document.documentElement.scrollWidth")
    assert width <= 390
    load.cancel()
    await asyncio.gather(load, return_exceptions=True)


@pytest.mark.exhaustive
async def test_requests_are_cancelled_and_faults_are_counted(
    page: Page, loaded_server: Served, client: httpx.AsyncClient
) -> None:
    """By their reasons; tokens per second come first, charts have axes, and the hour is the
    server's."""
    await sign_in(page, loaded_server.base_url)
    first = page.locator("#requests .tile").first
    await expect(first).to_have_id("tile-tokens-out")
    await expect(first.locator(".axis")).to_have_text(re.compile("[0-9]+ min agonow"))
    headers = {"Authorization": "Bearer sk-batch"}
    rows = page.locator("#running tr")
    # So many that most wait while the page asks.
    sent = asyncio.create_task(complete(client, "sk-batch", num=120, max_tokens=150))
    await rows.filter(has_text="batch").last.get_by_role("button").click()
    await asyncio.gather(sent, return_exceptions=True)
    note = page.locator("#running-note")
    await expect(note).to_have_text(re.compile("was cancelled|had ended|None"))
    await expect(rows).to_have_count(0)
    wrong = await client.post("/v1/completions", json={"model": "none"}, headers=headers)
    assert wrong.status_code >= 400
    fault = page.locator("#errors tr", has_text=f"{wrong.status_code} POST /v1/completions")
    await expect(fault).to_be_visible()
    await expect(fault.locator("td").first).to_have_text(re.compile("[1-9]"))
    kept = (await client.get("/v1/stats/history", headers=headers)).json()
    assert kept["times"]
    assert not any(name.startswith("tenant_") for name in kept["series"])  # no admin's key
    await page.get_by_label("Charts of").select_option("3600")
    await expect(first.locator(".axis")).to_have_text(re.compile("[0-9]+ min agonow"))
    await page.evaluate("sessionStorage['penstock.apiKey'] = 'sk-batch'")
    await page.reload()
    await expect(page.locator("#more-tenants")).to_have_text("An admin’s key shows them.")
