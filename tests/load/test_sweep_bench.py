"""`penstock bench sweep`: several servers in turns, and one that saturates."""

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
NOTHING = b"HTTP/1.1 %s\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class FullServer:
    """Answers the first requests, and refuses all others. It remembers what it was sent.

    Args:
        num_answers: that it gives.
    """

    def __init__(self, num_answers: int) -> None:
        self.prompts: list[tuple[int, ...]] = []
        self._num_answers = num_answers

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        if head.startswith("GET /v1/models"):
            writer.write(HEAD % b"application/json" + b'{"data": [{"id": "full"}]}')
        elif head.startswith("GET"):
            writer.write(NOTHING % b"404 Not Found")
        else:
            length = int(head.lower().split("content-length:")[1].split("\r\n")[0])
            body = json.loads(await reader.readexactly(length))
            self.prompts.append(tuple(body["prompt"]))
            if len(self.prompts) > self._num_answers:
                writer.write(NOTHING % b"503 Service Unavailable")
            else:
                self._stream(writer, body["max_tokens"])
        writer.close()

    def _stream(self, writer: asyncio.StreamWriter, num_tokens: int) -> None:
        writer.write(HEAD % b"text/event-stream")
        for number in range(num_tokens):
            reason = "length" if number == num_tokens - 1 else None
            self._send(writer, {"choices": [{"text": " a", "finish_reason": reason}]})
        usage = {"prompt_tokens": 1, "completion_tokens": num_tokens}
        self._send(writer, {"choices": [], "usage": usage})
        writer.write(b"data: [DONE]\n\n")

    def _send(self, writer: asyncio.StreamWriter, chunk: dict[str, Any]) -> None:
        writer.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")


@contextmanager
def full_server(num_answers: int) -> Iterator[tuple[FullServer, str]]:
    """It, and its address; in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    full = FullServer(num_answers)
    listening = asyncio.run_coroutine_threadsafe(
        asyncio.start_server(full.answer, "127.0.0.1", 0), loop
    ).result()
    try:
        yield full, f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(listening.close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def loads_of(report: dict[str, Any]) -> dict[str, list[float]]:
    return {
        curve["server"]: [point["load"] for point in curve["points"]] for curve in report["curves"]
    }


NUM_WARM_UPS = 4


def test_servers_take_turns_and_the_saturated_one_ends_early(
    penstock: Penstock, tmp_path: Path
) -> None:
    with (
        full_server(NUM_WARM_UPS) as (full, full_url),
        serve(SyntheticSettings(ttft_ms=20.0, itl_ms=2.0)) as wide,
    ):
        done = penstock(
            *("bench", "sweep", "--server", f"full={full_url}"),
            *("--server", f"wide={wide.base_url}", "--concurrency", "1,2"),
            *("--num-prompts", "4", "--input-len", "8", "--output-len", "12"),
            *("--plot", "--out", str(tmp_path)),
        )
    assert done.returncode == 1, "requests were refused"
    report = json.loads((tmp_path / "sweep.json").read_text())
    assert loads_of(report) == {"full": [1], "wide": [1, 2]}
    wide_curve = report["curves"][1]["points"]
    assert [point["runs"][0]["peak_concurrency"] for point in wide_curve] == [1, 2]
    told = [line.split(":")[0] for line in done.stdout.splitlines() if " tokens/s, TTFT" in line]
    assert told == ["full at 1", "wide at 1", "wide at 2"]
    assert len(full.prompts) == NUM_WARM_UPS + 4
    check_report(tmp_path, done.stdout)


def check_report(out: Path, printed: str) -> None:
    assert sorted(path.name for path in out.iterdir()) == ["sweep.json", "sweep.md", "sweep.png"]
    rows = [line for line in printed.splitlines() if line.startswith("| ")]
    assert len(rows) == 2 + 1 + 2
    assert set(rows) <= set((out / "sweep.md").read_text().splitlines())
    assert "- wide: at most" in printed


def test_rates_and_repeats(penstock: Penstock, tmp_path: Path) -> None:
    with full_server(1_000) as (server, base_url):
        done = penstock(
            *("bench", "sweep", "--server", f"it={base_url}", "--rates", "80,40"),
            *("--seconds", "0.25", "--num-prompts", "10", "--output-len", "3", "--repeat", "2"),
            *("--min-gain", "0", "--goodput", "ttft:1e9", "--out", str(tmp_path)),
        )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "sweep.json").read_text())
    assert loads_of(report) == {"it": [40.0, 80.0]}
    for point in report["curves"][0]["points"]:
        assert len(point["runs"]) == 2
        for run in point["runs"]:
            # As many as asked for, or as long as asked for; then the last one ends.
            num_requests = {40.0: 10, 80.0: 20}[point["load"]]
            assert run["num_requests"] == num_requests
            assert run["duration_s"] > num_requests / point["load"]
            assert run["goodput"]["share"] == 1.0
    # No prompt twice: not at another load, not again, not in the warm-up.
    assert len(server.prompts) == len(set(server.prompts)) == NUM_WARM_UPS + 2 * (10 + 20)


def summary(*, tokens_per_s: float = 8.0, e2e_ms: float = 5.0) -> Summary:
    none = Quantiles.of([0.0])
    return Summary(
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
        output_tokens_per_s=tokens_per_s,
        total_tokens_per_s=tokens_per_s + 1.0,
        tokens_per_event=8.0,
        peak_concurrency=1,
        ttft_ms=Quantiles.of([e2e_ms]),
        itl_ms=none,
        tpot_ms=none,
        e2e_ms=Quantiles.of([e2e_ms]),
        send_lag_ms=none,
        goodput=None,
        faults={},
        fault_details={},
        client_cpu_share=0.0,
    )


def test_the_picture_shows_a_line_for_each_server(tmp_path: Path) -> None:
    curves = [
        Curve(
            name,
            [
                Point(load, [summary(tokens_per_s=factor * load, e2e_ms=factor + load)])
                for load in (1.0, 2.0, 4.0, 8.0)
            ],
        )
        for name, factor in (("one", 5.0), ("other", 9.0))
    ]
    draw_sweep(curves, "both", "dialogues", tmp_path / "sweep.png")
    with Image.open(tmp_path / "sweep.png") as picture:
        colours = picture.convert("RGB").getcolors(maxcolors=1 << 24)
    counts: dict[Any, int] = {colour: count for count, colour in colours or ()}
    for colour in (BLUE, ORANGE):  # in four panels
        assert counts[ImageColor.getrgb(colour)] > 2000


def test_answers_whose_tokens_all_come_at_once_are_drawn(tmp_path: Path) -> None:
    curve = Curve("server", [Point(1.0, [summary()]), Point(2.0, [summary()])])
    draw_sweep([curve], "at once", "dialogues", tmp_path / "sweep.png")
    with Image.open(tmp_path / "sweep.png") as image:
        assert image.width > 100
