"""`penstock bench sweep` as a process: several servers in turns, and one that saturates."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image, ImageColor

from penstock.load.bench.sweep import Curve, Point, draw_sweep
from penstock.load.report.plots import BLUE, ORANGE
from penstock.load.report.summary import Quantiles, Summary

from ..support.synthetic.server import serve
from ..support.synthetic.settings import SyntheticSettings
from .conftest import Penstock

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nConnection: close\r\n\r\n"


class NarrowServer:
    """Answers two at a time, a token each 5 ms, and 15 ms while others wait: more than two are
    worse than two, also where the machine stood still for two. It counts what it was sent."""

    def __init__(self) -> None:
        self._num_waiting = 0
        self.prompts: list[tuple[int, ...]] = []
        self._room = asyncio.Semaphore(2)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        if head.startswith("GET /v1/models"):
            writer.write(HEAD % b"application/json" + b'{"data": [{"id": "narrow"}]}')
        elif head.startswith("GET"):
            writer.write(
                b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            )
        else:
            length = int(head.lower().split("content-length:")[1].split("\r\n")[0])
            body = json.loads(await reader.readexactly(length))
            self.prompts.append(tuple(body["prompt"]))
            writer.write(HEAD % b"text/event-stream")
            self._num_waiting += 1
            async with self._room:
                self._num_waiting -= 1
                await self._stream(writer, body["max_tokens"])
        writer.close()

    async def _stream(self, writer: asyncio.StreamWriter, num_tokens: int) -> None:
        for number in range(num_tokens):
            await asyncio.sleep(0.015 if self._num_waiting else 0.005)
            reason = "length" if number == num_tokens - 1 else None
            self._send(writer, {"choices": [{"text": " a", "finish_reason": reason}]})
        usage = {"prompt_tokens": 1, "completion_tokens": num_tokens}
        self._send(writer, {"choices": [], "usage": usage})
        writer.write(b"data: [DONE]\n\n")

    def _send(self, writer: asyncio.StreamWriter, chunk: dict[str, Any]) -> None:
        writer.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")


@contextmanager
def narrow_server() -> Iterator[tuple[NarrowServer, str]]:
    """It, and its address; in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    narrow = NarrowServer()
    listening = asyncio.run_coroutine_threadsafe(
        asyncio.start_server(narrow.answer, "127.0.0.1", 0), loop
    ).result()
    try:
        yield narrow, f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(listening.close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def loads_of(report: dict[str, Any]) -> dict[str, list[float]]:
    return {
        curve["server"]: [point["load"] for point in curve["points"]] for curve in report["curves"]
    }


def test_servers_take_turns_and_the_saturated_one_ends_early(
    penstock: Penstock, tmp_path: Path
) -> None:
    with (
        narrow_server() as (narrow, narrow_url),
        serve(SyntheticSettings(ttft_ms=80.0, itl_ms=2.0)) as wide,
    ):
        done = penstock(
            *("bench", "sweep", "--server", f"narrow={narrow_url}"),
            *("--server", f"wide={wide.base_url}", "--concurrency", "1,2,4,8"),
            *("--num-prompts", "4", "--input-len", "8", "--output-len", "12"),
            *("--min-gain", "0.1", "--plot", "--out", str(tmp_path)),
        )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "sweep.json").read_text())
    loads = loads_of(report)
    assert loads["wide"] == [1, 2, 4, 8]
    # Two at a time is all it can: four are no faster, and wait.
    assert loads["narrow"] == [1, 2, 4]
    for curve in report["curves"]:
        at_once = [point["runs"][0]["peak_concurrency"] for point in curve["points"]]
        assert at_once == loads[curve["server"]]
    told = [line.split(":")[0] for line in done.stdout.splitlines() if " tokens/s, TTFT" in line]
    assert told[:6] == [f"{name} at {load}" for load in (1, 2, 4) for name in ("narrow", "wide")]
    # No prompt twice: not at another load, not in the warm-up.
    assert len(narrow.prompts) == len(set(narrow.prompts)) == 4 + 4 * (1 + 2 + 4)
    check_report(tmp_path, done.stdout)


def check_report(out: Path, printed: str) -> None:
    assert sorted(path.name for path in out.iterdir()) == ["sweep.json", "sweep.md", "sweep.png"]
    rows = [line for line in printed.splitlines() if line.startswith("| ")]
    assert len(rows) == 2 + 3 + 4
    assert set(rows) <= set((out / "sweep.md").read_text().splitlines())
    assert "- narrow: at most" in printed
    with Image.open(out / "sweep.png") as picture:
        colours = picture.convert("RGB").getcolors(maxcolors=1 << 24)
    counts: dict[Any, int] = {colour: count for count, colour in colours or ()}
    for colour in (BLUE, ORANGE):  # one line each, in four panels
        assert counts[ImageColor.getrgb(colour)] > 2000


def test_rates_and_repeats(penstock: Penstock, tmp_path: Path) -> None:
    with serve(SyntheticSettings(ttft_ms=5.0, itl_ms=2.0)) as server:
        done = penstock(
            *("bench", "sweep", "--server", f"it={server.base_url}", "--rates", "40,8"),
            *(
                "--seconds",
                "1.5",
                "--num-prompts",
                "20",
                "--output-len",
                "3",
                "--repeat",
                "2",
                "--endpoint",
                "chat",
            ),
            *("--min-gain", "0", "--goodput", "ttft:1e9", "--out", str(tmp_path)),
        )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "sweep.json").read_text())
    assert loads_of(report) == {"it": [8.0, 40.0]}
    for point in report["curves"][0]["points"]:
        assert len(point["runs"]) == 2
        for run in point["runs"]:
            # As long as asked for, or as many as asked for; then the last one ends.
            num_requests = {8.0: 20, 40.0: 60}[point["load"]]
            assert run["num_requests"] == num_requests
            assert 0 < run["duration_s"] - num_requests / point["load"] < 60
            assert run["goodput"]["share"] == 1.0


def test_answers_whose_tokens_all_come_at_once_are_drawn(tmp_path: Path) -> None:
    none = Quantiles.of([0.0])
    summary = Summary(
        num_requests=1,
        num_completed=1,
        num_failed=0,
        num_unsent=0,
        num_without_text=0,
        duration_s=1.0,
        num_prompt_tokens=1,
        num_cached_tokens=0,
        num_output_tokens=8,
        requests_per_s=1.0,
        output_tokens_per_s=8.0,
        total_tokens_per_s=9.0,
        tokens_per_event=8.0,
        peak_concurrency=1,
        ttft_ms=Quantiles.of([5.0]),
        itl_ms=none,
        tpot_ms=none,
        e2e_ms=Quantiles.of([5.0]),
        send_lag_ms=none,
        goodput=None,
        faults={},
        fault_details={},
        client_cpu_share=0.0,
    )
    curve = Curve("server", [Point(1.0, [summary]), Point(2.0, [summary])])
    draw_sweep([curve], "at once", "dialogues", tmp_path / "sweep.png")
    with Image.open(tmp_path / "sweep.png") as image:
        assert image.width > 100
