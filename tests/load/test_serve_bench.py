"""`penstock bench serve`, against servers whose latency is known beforehand."""

from __future__ import annotations

import json
import os
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageColor

from penstock.load.report.plots import BLUE, ORANGE, SKY

from ..support.synthetic.server import SyntheticServer
from ..support.synthetic.settings import SyntheticSettings
from .conftest import Penstock

KNOWN = SyntheticSettings()  # of the server that all tests share


class Bench:
    """Runs the bench; what it printed, and the report it wrote."""

    def __init__(self, penstock: Penstock, server: SyntheticServer, out: Path) -> None:
        self._penstock = penstock
        self._server = server
        self.out = out

    def __call__(self, *arguments: str, code: int = 0) -> tuple[str, dict[str, Any]]:
        done = self._penstock(
            "bench",
            "serve",
            "--base-url",
            self._server.base_url,
            "--out",
            str(self.out),
            *arguments,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout, json.loads((self.out / "serve.json").read_text())

    def records(self) -> list[dict[str, Any]]:
        """What `--save-records` left."""
        lines = (self.out / "serve-records.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


@pytest.fixture
def bench(penstock: Penstock, server: SyntheticServer, tmp_path: Path) -> Bench:
    return Bench(penstock, server, tmp_path)


WIRES = {
    "completions": ("--endpoint", "completions"),
    "chat": ("--endpoint", "chat"),
    "responses": ("--endpoint", "responses"),
    "websocket": ("--transport", "websocket"),
}


@pytest.mark.parametrize(
    "wire",
    [
        "chat",
        "websocket",
        pytest.param("completions", marks=pytest.mark.exhaustive),
        pytest.param("responses", marks=pytest.mark.exhaustive),
    ],
)
def test_a_known_latency_is_measured_right(bench: Bench, wire: str) -> None:
    """Servers and readers oversleep, never undersleep: no token is early, and none is later than
    this test. The figures are those of these times."""
    arguments = ("--num-prompts", "16", "--max-concurrency", "8", "--output-len", "30")
    began_s = time.perf_counter()
    _, report = bench(*WIRES[wire], *arguments, "--save-records")
    took_ms = 1e3 * (time.perf_counter() - began_s)
    summary = report["summary"]
    assert (summary["num_completed"], summary["num_failed"]) == (16, 0)
    assert summary["num_output_tokens"] == 16 * 30
    assert summary["peak_concurrency"] == 8
    times_ms = 1e3 * np.array(
        [np.subtract(record["event_times_s"], record["scheduled_s"]) for record in bench.records()]
    )
    due_ms = KNOWN.ttft_ms + KNOWN.itl_ms * np.arange(30)
    assert np.min(times_ms - due_ms) > -1
    assert np.max(times_ms) < took_ms
    ttft, itl, tpot, e2e = (summary[f"{name}_ms"] for name in ("ttft", "itl", "tpot", "e2e"))
    assert ttft["p50"] == pytest.approx(np.median(times_ms[:, 0]), abs=1e-6)
    assert itl["p50"] == pytest.approx(np.median(np.diff(times_ms)), abs=1e-6)
    assert e2e["p50"] == pytest.approx(np.median(times_ms[:, -1]), abs=1e-6)
    assert tpot["mean"] == pytest.approx(itl["mean"])
    assert e2e["mean"] == pytest.approx(ttft["mean"] + 29 * tpot["mean"])
    # By Little's law, 8 streams of that length, or longer.
    assert 0.0 < summary["output_tokens_per_s"] <= 8 * 30 / due_ms[-1] * 1e3


def test_the_report_is_printed_and_written(bench: Bench) -> None:
    printed, report = bench(
        *("--num-prompts", "20", "--request-rate", "40", "--output-len", "4-8"),
        *("--goodput", "ttft:1e9", "e2e:1", "--plot", "--save-records"),
        *("--api-key", "the-secret"),
    )
    names = ["serve-records.jsonl", "serve.json", "serve.md", "serve.png"]
    assert sorted(path.name for path in bench.out.iterdir()) == names
    assert "the-secret" not in printed + json.dumps(report)
    markdown = (bench.out / "serve.md").read_text()
    for line in printed.splitlines():
        assert line in markdown or line.startswith("wrote")
    assert report["model"] == "synthetic"
    assert report["settings"]["output_len"] == "4-8"
    assert report["summary"]["goodput"] == {"share": 0.0, "requests_per_s": 0.0}
    assert "40 dialogues a second" in printed

    records = bench.records()
    assert [record["dialogue"] for record in records] == list(range(20))
    assert all(4 <= record["output_tokens"] <= 8 for record in records)
    # The last arrival is where the rate says, from the start of the run.
    assert records[-1]["scheduled_s"] == pytest.approx(0.5)
    for record in records:
        times_s = [record["scheduled_s"], record["sent_s"], *record["event_times_s"]]
        assert times_s == sorted(times_s)
        assert len(record["event_times_s"]) == record["output_tokens"]


def test_the_picture_shows_the_run(bench: Bench) -> None:
    bench("--num-prompts", "12", "--max-concurrency", "4", "--output-len", "10", "--plot")
    with Image.open(bench.out / "serve.png") as picture:
        assert min(picture.size) > 1000
        colours = picture.convert("RGB").getcolors(maxcolors=1 << 24)
    counts: dict[Any, int] = {colour: count for count, colour in colours or ()}
    for colour in (BLUE, ORANGE, SKY):  # decode and prefill bars, histograms
        assert counts[ImageColor.getrgb(colour)] > 10_000


@pytest.mark.parametrize(
    "arguments",
    [("--endpoint", "chat"), ("--transport", "websocket", "--history", "previous_response_id")],
)
def test_conversations_find_their_past(bench: Bench, arguments: tuple[str, ...]) -> None:
    _, report = bench(
        *arguments,
        *("--dataset", "conversations", "--num-prompts", "3", "--turns", "3"),
        *("--max-concurrency", "3", "--prefix-len", "60", "--output-len", "5"),
        *("--input-len", "10", "--save-records"),
    )
    assert report["summary"]["num_completed"] == 9
    records = bench.records()
    for dialogue in range(3):
        turns = [record for record in records if record["dialogue"] == dialogue]
        prompts = [turn["prompt_tokens"] for turn in turns]
        assert 60 < prompts[0] < prompts[1] < prompts[2]
        for before, after in pairwise(turns):
            assert after["scheduled_s"] == pytest.approx(before["ended_s"], abs=1e-6)


def test_a_trace_keeps_its_times(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    times_ms = (5000, 5100, 5400)
    path.write_text(
        "\n".join(
            json.dumps({"timestamp": time_ms, "input_length": 9, "output_length": 3})
            for time_ms in times_ms
        )
    )
    bench("--dataset", "trace", "--dataset-path", str(path), "--save-records")
    records = bench.records()
    assert [record["scheduled_s"] for record in records] == pytest.approx([0, 0.1, 0.4], abs=1e-9)
    assert [(record["prompt_tokens"], record["output_tokens"]) for record in records] == [
        (9, 3)
    ] * 3


@pytest.mark.parametrize(("fault", "name"), [("cut:5", "cut"), ("lose:5", "lost_tokens")])
def test_a_fault_is_seen_named_and_fatal(bench: Bench, fault: str, name: str) -> None:
    body = json.dumps({"synthetic": {"fault": fault}})
    arguments = ("--num-prompts", "4", "--output-len", "9", "--num-warmups", "0")
    printed, report = bench(*arguments, "--extra-body", body, code=1)
    summary = report["summary"]
    assert summary["num_failed"] == 4
    assert summary["faults"][name] == 4
    assert summary["ttft_ms"]["p50"] is None
    assert f"{name} ×4: " in printed


def test_a_server_that_is_not_there_is_named(penstock: Penstock, tmp_path: Path) -> None:
    done = penstock("bench", "serve", "--base-url", "http://127.0.0.1:9", "--out", str(tmp_path))
    assert done.returncode == 2
    assert "no server at http://127.0.0.1:9" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (
            ("--transport", "websocket", "--endpoint", "chat"),
            "supports only the endpoint responses",
        ),
        (("--history", "previous_response_id"), "needs --endpoint responses"),
        (("--extra-body", "{"), "--extra-body is not JSON"),
        (("--extra-body", "3"), "--extra-body must be a JSON object"),
        (("--goodput", "speed:1"), "objectives are"),
        (("--input-len", "9-3"), "--input-len has the invalid value"),
        (("--stall-s", "0"), "--stall-s"),
        (("--dataset", "jsonl", "--dataset-path", os.devnull), "is empty"),
        (("--extra-body", '{"max_tokens": "many"}'), "a warm-up request was refused"),
    ],
)
def test_settings_without_sense_are_refused(
    penstock: Penstock, server: SyntheticServer, tmp_path: Path, arguments: tuple[str, ...],
    fault: str,
) -> None:  # fmt: skip
    done = penstock(
        "bench", "serve", "--base-url", server.base_url, "--out", str(tmp_path), *arguments
    )
    assert done.returncode == 2
    assert fault in done.stderr
    assert list(tmp_path.iterdir()) == []
