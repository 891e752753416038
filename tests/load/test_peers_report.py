"""From observations to cells and tables: ratios of pairs, and who wins."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from penstock.load.peers.report import Row, cells, chosen_setting, summary, write
from penstock.load.peers.rivals import RIVALS

RESULTS = Path(__file__).parents[2] / "load" / "RESULTS.md"
SEEN: Row = {
    "model": "S",
    "workload": "c8",
    "system": "penstock",
    "setting": "default",
    "flags": "default",
    "round": 0,
    "pair": "vllm",
    "output_tokens_per_s": 100.0,
    "ttft_ms_p50": 10.0,
    "ttft_ms_p99": 20.0,
    "itl_ms_p50": 1.0,
    "itl_ms_p99": 2.0,
    "cpu_s_per_1k_tokens": {"main": 0.5},
    "ready_s": 1.0,
    "idle_memory_bytes": 1 << 30,
    "client_cpu_share": 0.1,
    "faults": {},
}
OF_RIVAL = {**SEEN, "system": "vllm", "setting": "bound", "flags": "bound: X=1"}


def pair(number: int, ours: float, rival: float, **values: Any) -> list[Row]:
    return [
        {**SEEN, "round": number, "output_tokens_per_s": ours, **values},
        {**OF_RIVAL, "round": number, "output_tokens_per_s": rival, **values},
    ]


def data_of(*observations: Row) -> Row:
    where = {"cpu": "x", "cores": 2, "memory_gib": 8, "client_scheduling": "normal"}
    return {
        "date": "2026-01-01", "comparison": "bf16", "machine": where, "commit": "abc",
        "versions": {"vllm": "1.2"}, "unavailable": {}, "failures": [],
        "observations": list(observations),
    }  # fmt: skip


def test_a_ratio_is_the_median_of_pairs_not_of_medians() -> None:
    """The machine slowed down to half in the second round and to a quarter in the third."""
    ours, rival = cells(pair(0, 400, 200) + pair(1, 200, 120) + pair(2, 100, 70))
    assert (ours["system"], ours["output_tokens_per_s"]) == ("penstock", 200)
    assert ours["ratio_to_penstock"] == 1.0
    assert (rival["output_tokens_per_s"], rival["repeats"]) == (120, 3)
    assert rival["ratio_to_penstock"] == 0.6
    assert (rival["ratio_min"], rival["ratio_max"]) == (0.5, 0.7)


def test_the_setting_that_was_fastest_at_first_counts() -> None:
    slow = {**pair(0, 100, 50)[1], "setting": "unbound"}
    seen = [*pair(0, 100, 80), slow, *pair(1, 100, 90)]
    assert chosen_setting(seen, ("S", "c8", "vllm")) == "bound"
    _, rival = cells(seen)
    assert rival["output_tokens_per_s"] == 85


def test_ours_before_another_rival_makes_no_pair() -> None:
    other = {**SEEN, "pair": "hf", "round": 1, "output_tokens_per_s": 1e6}
    _, rival = cells([*pair(0, 100, 50), other])
    assert (rival["ratio_min"], rival["ratio_max"]) == (0.5, 0.5)


def test_an_observation_with_faults_counts_for_nothing() -> None:
    good, bad = pair(0, 100, 50)[1], pair(0, 100, 500)[1]
    _, rival = cells([SEEN, {**bad, "setting": "unbound", "faults": {"cut": 3}}, good])
    assert (rival["ratio_to_penstock"], rival["setting"]) == (0.5, "bound")


def test_files_say_who_wins_and_who_is_missing(tmp_path: Path) -> None:
    single = pair(0, 100, 50, workload="single")
    faulty = {**SEEN, "workload": "c32", "faults": {"cut": 3}}
    data = data_of(*pair(0, 100, 150), *pair(1, 100, 170), *single, faulty)
    data["unavailable"]["hf"] = "no such wheel"
    failure = {**OF_RIVAL, "workloads": ["c8"], "round": 2, "reason": "it ended"}
    data["failures"].append(failure)
    text, again = (path.read_text("utf-8") for path in write(data, tmp_path))
    winners = re.findall(r"^\| (\w+) +\| +\*\*(\w+)\*\*", text, re.MULTILINE)
    assert winners == [("c8", "vllm"), ("single", "penstock")]
    for said in ("1.50–1.70", "hf: no such wheel", "round 3, c8: it ended", "cut ×3"):
        assert said in text
    rival, _ = (each for each in json.loads(again)["cells"] if each["system"] == "vllm")
    assert rival["settings"] == "bound: X=1"
    assert (rival["ratio_to_penstock"], rival["repeats"]) == (1.6, 2)


def test_a_rival_alone_has_figures_but_no_ratio(tmp_path: Path) -> None:
    _, path = write(data_of(pair(0, 100, 50)[1]), tmp_path)
    [cell] = json.loads(path.read_text("utf-8"))["cells"]
    assert (cell["output_tokens_per_s"], cell["ratio_to_penstock"]) == (50, None)


@pytest.mark.parametrize("comparison", RIVALS)
def test_the_newest_comparison_is_among_the_results(comparison: str) -> None:
    pattern = "*-peers.json" if comparison == "bf16" else f"*-peers-{comparison}.json"
    data = json.loads(max((RESULTS.parent / "results").glob(pattern)).read_text("utf-8"))
    assert data.get("comparison", "bf16") == comparison
    assert summary(data["cells"]) in RESULTS.read_text("utf-8")


def test_more_than_one_means_that_ours_is_faster() -> None:
    row = summary(cells(pair(0, 300.0, 200.0))).splitlines()[-1]
    assert [part.strip() for part in row.split("|")[1:-1]] == ["S, 8 in flight", "300", "1.50×"]
