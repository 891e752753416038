"""`penstock bench serve`, against servers whose latency is known beforehand."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.load import serve as bench_serve
from penstock.load.launch import Started
from penstock.load.report.summary import summarize
from penstock.load.serve import Run, points_of, sweep_table
from penstock.load.workloads.options import Load

from ..support.synthetic.server import SyntheticServer, serve
from ..support.synthetic.settings import SyntheticSettings
from .conftest import Penstock
from .made_up_runs import record, result_of

KNOWN = SyntheticSettings()  # of the server that all tests share


class Bench:
    """Runs the bench; what it printed, and the report it wrote."""

    def __init__(self, penstock: Penstock, base_url: str, out: Path) -> None:
        self._penstock = penstock
        self._base_url = base_url
        self.out = out

    def __call__(self, *arguments: str, code: int = 0) -> tuple[str, list[dict[str, Any]]]:
        where = () if "--base-url" in arguments else ("--base-url", self._base_url)
        done = self._penstock("bench", "serve", *where, "--out", str(self.out), *arguments)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout, json.loads((self.out / "serve.json").read_text())["runs"]

    def records(self) -> list[dict[str, Any]]:
        """What `--save-records` left."""
        lines = (self.out / "serve-records.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


@pytest.fixture
def bench(penstock: Penstock, server: SyntheticServer, tmp_path: Path) -> Bench:
    return Bench(penstock, server.base_url, tmp_path)


@pytest.mark.parametrize(
    "wire",
    [
        ("--endpoint", "chat"),
        ("--transport", "websocket"),
        pytest.param(("--endpoint", "completions"), marks=pytest.mark.exhaustive),
        pytest.param(("--endpoint", "responses"), marks=pytest.mark.exhaustive),
    ],
)
def test_a_known_latency_is_measured_right(bench: Bench, wire: tuple[str, ...]) -> None:
    """Servers and readers oversleep, never undersleep: no token is early, and none is later than
    this test. The figures are those of these times."""
    arguments = ("--num-prompts", "16", "--max-concurrency", "8", "--output-len", "30")
    began_s = time.perf_counter()
    _, [run] = bench(*wire, *arguments, "--save-records")
    took_ms = 1e3 * (time.perf_counter() - began_s)
    summary = run["summary"]
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
    # By Little's law, 8 streams of that length, or longer.
    assert 0.0 < summary["output_tokens_per_s"] <= 8 * 30 / due_ms[-1] * 1e3


def test_the_report_is_printed_and_written(bench: Bench) -> None:
    printed, [run] = bench(
        *("--num-prompts", "20", "--request-rate", "40", "--output-len", "4-8"),
        *("--goodput", "ttft:1e9", "e2e:1", "--save-records", "--api-key", "the-secret"),
    )
    names = ["serve-records.jsonl", "serve.json", "serve.md"]
    assert sorted(path.name for path in bench.out.iterdir()) == names
    assert "the-secret" not in printed + (bench.out / "serve.json").read_text()
    markdown = (bench.out / "serve.md").read_text()
    for line in printed.splitlines():
        assert line in markdown or line.startswith("wrote")
    assert run["summary"]["goodput"] == {"share": 0.0, "requests_per_s": 0.0}
    assert "40 a second" in printed
    records = bench.records()
    assert [record["dialogue"] for record in records] == list(range(20))
    assert all(4 <= record["output_tokens"] <= 8 for record in records)
    # The last arrival is where the rate says, from the start of the run.
    assert records[-1]["scheduled_s"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    "arguments",
    [("--endpoint", "chat"), ("--transport", "websocket", "--history", "previous_response_id")],
)
def test_a_conversations_turns_are_told_one_by_one(
    penstock: Penstock, demo: Started, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    """Of a real server: what of a prompt was cached counts."""
    bench = Bench(penstock, demo.base_url, tmp_path)
    printed, [run] = bench(
        *arguments,
        *("--dataset", "conversations", "--num-prompts", "3", "--turns", "3", "--save-records"),
        *("--max-concurrency", "1", "--prefix-len", "60", "--output-len", "5"),
        *("--input-len", "10", "--seed", str(len(arguments))),
    )
    assert run["summary"]["num_completed"] == 9
    first, second, third = run["turns"]
    assert 60 < first["prompt_tokens"] < second["prompt_tokens"] < third["prompt_tokens"]
    for turn in (second, third):
        assert 10 < turn["new_tokens"] < 60 < turn["prompt_tokens"]
        assert turn["ttft_ms"] > 0
    assert sum(line.startswith("| ") for line in printed.splitlines()) == (2 + 4) + (2 + 3) + 5
    for dialogue in range(3):
        turns = [record for record in bench.records() if record["dialogue"] == dialogue]
        for before, after in pairwise(turns):
            assert after["scheduled_s"] == pytest.approx(before["ended_s"], abs=1e-6)


@pytest.mark.parametrize(("fault", "name"), [("cut:5", "cut"), ("lose:5", "lost_tokens")])
def test_a_fault_is_seen_named_and_fatal(bench: Bench, fault: str, name: str) -> None:
    body = json.dumps({"synthetic": {"fault": fault}})
    arguments = ("--num-prompts", "4", "--output-len", "9", "--num-warmups", "0")
    printed, [run] = bench(*arguments, "--extra-body", body, code=1)
    assert run["summary"]["num_failed"] == run["summary"]["faults"][name] == 4
    assert run["summary"]["ttft_ms"]["p50"] is None
    assert f"{name} ×4: " in printed


# -- sweeps ---------------------------------------------------------------------------------------


def test_servers_take_turns(bench: Bench, server: SyntheticServer) -> None:
    with serve(SyntheticSettings(refuse_share=1.0, refuse_status=503)) as full:
        printed, runs = bench(
            *("--base-url", f"full={full.base_url}", "--base-url", f"wide={server.base_url}"),
            *("--max-concurrency", "2,1", "--num-prompts", "4", "--input-len", "8"),
            *("--output-len", "12", "--num-warmups", "0"),
            code=1,
        )
    found = [(run["server"], run["load"]["concurrency"]) for run in runs]
    assert found == [("full", 1), ("wide", 1), ("full", 2), ("wide", 2)]
    assert [run["summary"]["peak_concurrency"] for run in runs[1::2]] == [1, 2]
    assert sum(line.startswith("| ") for line in printed.splitlines()) == 2 + 4


def test_rates_and_repeats(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_serve, "_SECONDS", 0.25)
    _, runs = bench(
        *("--request-rate", "80,40", "--num-prompts", "10", "--output-len", "3"),
        *("--repeats", "2", "--goodput", "ttft:1e9", "--save-records"),
    )
    assert [run["load"]["rate"] for run in runs] == [40, 40, 80, 80]
    for run in runs:  # as many as asked for, or as long as a load must last
        assert run["summary"]["num_requests"] == {40: 10, 80: 20}[run["load"]["rate"]]
        assert run["summary"]["goodput"]["share"] == 1.0


def run_at(load: int, *, tokens_per_s: float, e2e_ms: float = 50.0) -> Run:
    made = result_of(record([5, e2e_ms], num_tokens=round(tokens_per_s * 2)))
    return Run("a", Load(concurrency=load), False, made, summarize(made))


def test_a_point_is_its_median_run() -> None:
    runs = [run_at(1, tokens_per_s=rate) for rate in (30, 10, 20)]
    [point] = points_of(runs).values()
    assert point[0] is runs[2]
    [lower] = points_of(runs[:2]).values()
    assert lower[0] is runs[1]
    row = sweep_table(runs).splitlines()[2].split("|")
    assert [cell.strip() for cell in row[1:6]] == ["a", "1 in flight", "20", "3.00", "0.50"]


@pytest.mark.exhaustive
def test_a_flood_of_another_tenant_is_measured_beside_none(bench: Bench) -> None:
    arguments = ("--num-prompts", "4", "--max-concurrency", "2", "--output-len", "4")
    printed, runs = bench(*arguments, "--flood", "3", "--flood-api-key", "other")
    assert [run["is_flooded"] for run in runs] == [False, True]
    assert "2 in flight: beside the flood TTFT p99 is" in printed
    assert multiprocessing.active_children() == []  # the flood ends with the bench


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (("--base-url", "http://127.0.0.1:9"), "no server at http://127.0.0.1:9"),
        (("--base-url", "a=x", "--base-url", "a=y"), "must be URL or NAME=URL, each once"),
        (("--transport", "websocket", "--endpoint", "chat"), "supports only the endpoint"),
        (("--history", "previous_response_id"), "needs --endpoint responses"),
        (("--extra-body", "{"), "--extra-body has the invalid value"),
        (("--extra-body", "3"), "--extra-body has the invalid value"),
        (("--goodput", "speed:1"), "--goodput has the invalid value"),
        (("--input-len", "9-3"), "--input-len has the invalid value"),
        (("--stall-s", "0"), "--stall-s"),
        (("--burstiness", "2"), "needs --request-rate"),
        (("--request-rate", "1", "--max-concurrency", "1,2"), "a single --max-concurrency"),
        (("--request-rate", "0"), "--request-rate has the invalid value"),
        (("--dataset", "jsonl", "--dataset-path", os.devnull), "is empty"),
        (("--extra-body", '{"max_tokens": "many"}'), "a warm-up request was refused"),
    ],
)
def test_settings_without_sense_are_refused(
    penstock: Penstock, server: SyntheticServer, tmp_path: Path, arguments: tuple[str, ...],
    fault: str,
) -> None:  # fmt: skip
    where = () if "--base-url" in arguments else ("--base-url", server.base_url)
    done = penstock("bench", "serve", *where, "--out", str(tmp_path), *arguments)
    assert done.returncode == 2
    assert fault in done.stderr
    assert list(tmp_path.iterdir()) == []
