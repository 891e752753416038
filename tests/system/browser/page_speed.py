"""How fast the chat page is: its first load, a long answer as it comes, and what is long already.

`python -m tests.system.browser.page_speed` has a gateway with a fake engine say a long answer in
Markdown to the page in the system's Chromium. It prints the bytes of a first load and the time
until the page is connected; of the answer, the processor time of the page's scripts
(`ScriptDuration`, by its thread's clock, so that a busy machine changes little) and how many frames
came late; and, unless `--rounds-only`, late frames and times with 1,000 conversations, an answer of
50,000 characters and 200 turns. A token has about four characters. `--page DIR` measures another
version of `clients/browser/` in turns with this one. Times and frames are those of a quiet machine.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import shutil
import statistics
import tempfile
import time
import unittest.mock
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import httpx
import msgspec
from playwright.async_api import Browser, Page, async_playwright

from penstock.engine.config import DEMO_MODEL, ModelConfig
from penstock.engine.model_files.resolve import resolve_model
from penstock.engine.request import Request, RequestOutput
from penstock.engine.text import Tokenizer
from penstock.gateway import app as gateway_app
from penstock.gateway.config import GatewayConfig
from penstock.gateway.http.page import PAGE_DIRECTORY
from tests.gateway.conftest import listen
from tests.gateway.fake_engine import INFO, FakeEngine
from tests.system.browser.conftest import make_conversation
from tests.system.browser.page_flow import (
    CHROMIUM_ARGS,
    CODE,
    connected,
    finished,
    open_page,
    say,
)

_CHARS_PER_TOKEN = 4
_LATE_MS = 34  # one of 60 frames a second was left out
_NUM_LOADS = 5
_NUM_CONVERSATIONS = 1_000
_NUM_LONG_CHARS = 50_000
_NUM_TURNS = 200
# Looks only when the answer ends: what `expect` does in the page meanwhile would be counted too.
_END = """(answer) => new Promise((resolve) => {
  const look = () => { if (answer.ariaBusy === "false") resolve(answer.textContent.length); };
  new MutationObserver(look).observe(answer, { attributes: true });
  look();
})"""
_BYTES = """[...performance.getEntriesByType("navigation"),
  ...performance.getEntriesByType("resource")].reduce((sum, one) => sum + one.transferSize, 0)"""
_COUNT_FRAMES = """() => {
  window.frames_ms = [];
  let last = performance.now();
  const next = (now) => { frames_ms.push(now - last); last = now; requestAnimationFrame(next); };
  requestAnimationFrame(next);
}"""
_SECTION = f"""## How a queue is bounded

A queue bounded by *tokens*, not by requests, is **fair to short prompts**: a request is admitted
when what it may need at most still fits, and what is refused is told when to come back. The
estimate is `num_tokens` divided by the rate of the last minute, as [they say](https://example.com/q),
and errs rather on the long side. What is admitted is never dropped, however long it takes.

- **Short prompts** pass while a long one waits, as long as it has not waited for too long itself.
- What is refused is told *when to come back*, in seconds, rounded up:
  1. from the rate of the last minute,
  2. or from that of the hour before.
- [x] The server's own `Retry-After` is kept.

{CODE}

| policy | waits | refuses |
|---|---:|---|
| first come | as long as the longest | what exceeds the queue |
| shortest first | **least** on average | nothing that is short |

> What has been admitted is answered, whatever comes after it.

"""


class _Engine(FakeEngine):
    """Says so many of its script's tokens at once that they have about as many characters as one of
    a large model's."""

    num_at_once = 1

    def _outputs(self, request: Request, index: int) -> Iterator[RequestOutput]:
        outputs = super()._outputs(request, index)
        while several := list(itertools.islice(outputs, self.num_at_once)):
            token_ids = tuple(itertools.chain.from_iterable(one.token_ids for one in several))
            yield msgspec.structs.replace(several[-1], token_ids=token_ids)


@asynccontextmanager
async def _gateway(page: Path, num_chars: int, tokens_per_s: float) -> AsyncIterator[str]:
    """The address of one with another page; it says `_SECTION` over and over."""
    path = resolve_model(ModelConfig(model=DEMO_MODEL), weights=False)
    text = (_SECTION * (num_chars // len(_SECTION) + 1))[:num_chars]
    script = Tokenizer.from_directory(path).encode(text, add_special_tokens=False)
    info = msgspec.structs.replace(INFO, max_model_len=1 << 16, vocab_size=1 << 20)
    with tempfile.TemporaryDirectory() as folder:
        address = f"{folder}/engine.sock"
        config = GatewayConfig(
            engine_address=address,
            model=ModelConfig(model=DEMO_MODEL),
            served_model_names=("fake",),
        )
        engine = _Engine(address, script, step_s=1 / tokens_per_s, info=info)
        engine.num_at_once = round(_CHARS_PER_TOKEN * len(script) / len(text))
        chat_page = partial(gateway_app.ChatPage, page)
        with unittest.mock.patch.object(gateway_app, "ChatPage", chat_page):
            app = gateway_app.create_app(config)
        async with engine, listen(app, config) as port:
            yield f"http://127.0.0.1:{port}"


@dataclasses.dataclass(frozen=True)
class _Frames:
    """Those of a while: how many, how many of them late, and the longest in milliseconds."""

    num: int
    num_late: int
    longest_ms: float

    def __str__(self) -> str:
        return f"{self.num_late} of {self.num:,} frames late, the longest {self.longest_ms:.0f} ms"


async def _frames(page: Page) -> _Frames:
    """Those since the last call."""
    times: list[float] = await page.evaluate("frames_ms.splice(0)")
    return _Frames(len(times), sum(one > _LATE_MS for one in times), max(times, default=0))


async def _first_loads(browser: Browser, url: str) -> str:
    times = []
    for _ in range(_NUM_LOADS):
        page = await browser.new_page()
        start_s = time.monotonic()
        await page.goto(url)
        await connected(page)
        times.append(time.monotonic() - start_s)
        num_bytes: int = await page.evaluate(_BYTES)
        await page.close()
    return f"first load {num_bytes:,} bytes, connected after {statistics.median(times):.2f} s"


async def _measure(browser: Browser, url: str) -> tuple[float, int, float, _Frames]:
    """Seconds of script, characters drawn, seconds from the message to the answer's end, frames."""
    page = await browser.new_page(viewport={"width": 1000, "height": 640})
    await open_page(page, url, max_output_tokens="")
    session = await page.context.new_cdp_session(page)
    await session.send("Performance.enable", {"timeDomain": "threadTicks"})

    async def script_s() -> float:
        figures = (await session.send("Performance.getMetrics"))["metrics"]
        return float(next(one["value"] for one in figures if one["name"] == "ScriptDuration"))

    before, start_s = await script_s(), time.monotonic()
    await page.evaluate(_COUNT_FRAMES)
    turn = await say(page, "Tell me about queues.")
    num_chars: int = await turn.locator("> .assistant").evaluate(_END)
    seconds = await script_s() - before
    lasted_s = time.monotonic() - start_s
    frames = await _frames(page)
    await page.close()
    return seconds, num_chars, lasted_s, frames


async def _long_ones(browser: Browser, url: str) -> AsyncIterator[str]:
    """A long list, a long answer, a long conversation: each made, shown and scrolled through."""
    text = (_SECTION * (_NUM_LONG_CHARS // len(_SECTION) + 1))[:_NUM_LONG_CHARS]
    said = [(role, f"{role} {n}") for n in range(_NUM_TURNS) for role in ("user", "assistant")]
    async with httpx.AsyncClient(base_url=f"{url}/v1/", timeout=60) as api:
        for number in range(_NUM_CONVERSATIONS):
            await make_conversation(api, [], title=f"Conversation {number}")
        long = await make_conversation(api, [("user", "?"), ("assistant", text)], title="Long")
        many = await make_conversation(api, said, title="Many")
    page = await browser.new_page(viewport={"width": 1280, "height": 800})
    await open_page(page, url)
    await page.evaluate(_COUNT_FRAMES)
    rows = page.locator("#conversations li")
    while await rows.count() < _NUM_CONVERSATIONS:
        await rows.last.scroll_into_view_if_needed()
        await page.wait_for_timeout(100)
    yield f"{await rows.count():,} conversations: {await _frames(page)}"
    for name, conversation in (("characters", long), ("messages", many)):
        start_s = time.monotonic()
        await page.evaluate(f"location.hash = '#{conversation}'")
        await page.locator(".message").nth(1).wait_for()
        shown_s = time.monotonic() - start_s
        num_chars: int = await page.evaluate("transcript.textContent.length")
        num = num_chars if name == "characters" else await page.locator(".message").count()
        await page.wait_for_timeout(500)
        await _frames(page)
        await page.mouse.move(800, 400)
        for _ in range(30):
            await page.mouse.wheel(0, -900)
            await page.wait_for_timeout(50)
        yield f"{num:,} {name}: shown after {shown_s:.2f} s, then {await _frames(page)}"
    await finished(await say(page, "Tell me about queues."))
    yield f"an answer after them: {await _frames(page)}"
    await page.close()


async def _run(parsed: argparse.Namespace) -> None:
    pages = [PAGE_DIRECTORY, *parsed.page]
    found: dict[Path, list[float]] = {page: [] for page in pages}
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=CHROMIUM_ARGS
        )
        for _ in range(parsed.rounds):
            for page in pages:
                async with _gateway(page, parsed.num_chars, parsed.tokens_per_s) as url:
                    if not found[page]:
                        print(f"{await _first_loads(browser, url)}: {page}", flush=True)
                    seconds, num_chars, lasted_s, frames = await _measure(browser, url)
                found[page].append(seconds)
                print(
                    f"{seconds:.2f} s of {lasted_s:.1f} s, {num_chars:,} characters, {frames}: "
                    f"{page}",
                    flush=True,
                )
        if not parsed.rounds_only:
            async with _gateway(PAGE_DIRECTORY, 1_000, parsed.tokens_per_s) as url:
                async for line in _long_ones(browser, url):
                    print(line, flush=True)
        await browser.close()
    for page, times in found.items():
        print(f"median {statistics.median(times):.2f} s of script: {page}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--page", type=Path, nargs="+", default=[], help="other versions of it")
    parser.add_argument("--num-chars", type=int, default=16_000)
    parser.add_argument("--tokens-per-s", type=float, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rounds-only", action="store_true", help="without what is long already")
    asyncio.run(_run(parser.parse_args()))


if __name__ == "__main__":
    main()
