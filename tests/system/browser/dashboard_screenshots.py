"""Pictures of the dashboard under load: `python -m tests.system.browser.dashboard_screenshots`.

They go to `clients/browser/screenshots/`. Look at them after every change of the page.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
from pathlib import Path
from typing import Literal

import httpx
from playwright.async_api import Page, ViewportSize, async_playwright

from tests.system.browser.page_flow import CHROMIUM_ARGS
from tests.system.processes import serve

_FOLDER = Path(__file__).parents[3] / "clients" / "browser" / "screenshots"
_SIZE = ViewportSize(width=1280, height=1040)
_LOAD_S = 75.0  # longer than the shortest chart
_SMALL = (
    "--num-blocks", "280", "--num-host-blocks", "160", "--max-num-seqs", "12",
    "--max-model-len", "1024", "--preemption", "swap",
)  # fmt: skip
_CLIENTS = {"web-app": 9, "batch-jobs": 5, "research": 3, "night-shift": 1}
_THEMES: dict[str, Literal["light", "dark"]] = {"dashboard": "light", "dashboard-dark": "dark"}


async def _use(client: httpx.AsyncClient, tenant: str, index: int) -> None:
    """One who asks again and again, until cancelled."""
    chance = random.Random(f"{tenant} {index}")
    while True:
        story = f"This is story number {chance.randrange(30)}. "
        body = {
            "model": "demo",
            "prompt": story
            + "Once upon a time there was a mill by a river. " * chance.randint(2, 40),
            "max_tokens": chance.randint(40, 400),
            "ignore_eos": True,
        }
        await client.post(
            "/v1/completions", json=body, headers={"Authorization": f"Bearer {tenant}"}
        )
        await asyncio.sleep(chance.expovariate(0.5))


async def _take_all(client: httpx.AsyncClient, pages: dict[str, Page]) -> None:
    for page in pages.values():
        await page.goto(f"{client.base_url}/dashboard")
        await page.get_by_role("textbox", name="API key").fill("web-app")
        await page.keyboard.press("Enter")
    async with asyncio.TaskGroup() as users:
        tasks = [
            users.create_task(_use(client, tenant, index))
            for tenant, num in _CLIENTS.items()
            for index in range(num)
        ]
        await asyncio.sleep(_LOAD_S)
        for name, page in pages.items():
            await page.screenshot(path=_FOLDER / f"{name}.png", full_page=True)
            print(f"{name}.png")
        for task in tasks:
            task.cancel()


async def main() -> None:
    _FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.toml"
        keys.write_text(
            "".join(
                f'[[keys]]\nkey = "{name}"\ntenant = "{name}"\nadmin = true\n' for name in _CLIENTS
            )
            + "".join(f"[tenants.{name}]\n" for name in _CLIENTS)
        )
        settings = (*_SMALL, "--api-keys-file", str(keys))
        with serve(*settings, log=Path(folder) / "log") as served:
            async with (
                async_playwright() as playwright,
                httpx.AsyncClient(base_url=served.base_url, timeout=120) as client,
            ):
                browser = await playwright.chromium.launch(
                    executable_path=shutil.which("chromium"), args=CHROMIUM_ARGS
                )
                pages = {
                    name: await browser.new_page(viewport=_SIZE, color_scheme=theme)
                    for name, theme in _THEMES.items()
                }
                await _take_all(client, pages)
                await browser.close()


if __name__ == "__main__":
    asyncio.run(main())
