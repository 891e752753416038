"""From observations to cells, tables and a picture: ratios of pairs, and who wins."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.load.peers.report import (
    RESULTS,
    Failure,
    Observation,
    Report,
    cells,
    chosen_setting,
    marker,
    summary,
    write,
)
from penstock.load.peers.rivals import RIVALS
from penstock.load.report.tables import marked, replace_marked

SEEN = Observation(
    model="S",
    workload="c8",
    system="penstock",
    setting="default",
    flags="default",
    round=0,
    pair="vllm",
    output_tokens_per_s=100.0,
    ttft_ms_p50=10.0,
    ttft_ms_p99=20.0,
    itl_ms_p50=1.0,
    itl_ms_p99=2.0,
    cpu_s_per_1k_tokens={"main": 0.5},
    ready_s=1.0,
    idle_memory_bytes=1 << 30,
)


def pair(number: int, ours: float, rival: float, setting: str = "bound") -> list[Observation]:
    return [
        replace(SEEN, round=number, output_tokens_per_s=ours),
        replace(
            SEEN,
            system="vllm",
            setting=setting,
            flags=f"{setting}: X=1",
            round=number,
            output_tokens_per_s=rival,
        ),
    ]


def test_a_ratio_is_the_median_of_pairs_not_of_medians() -> None:
    """The machine slowed down to half in the second round and to a quarter in the third."""
    seen = pair(0, 400, 200) + pair(1, 200, 120) + pair(2, 100, 70)
    ours, rival = cells(seen)
    assert (ours.system, ours.tokens_per_s, ours.ratio) == ("penstock", 200, 1.0)
    assert rival.tokens_per_s == 120
    assert rival.ratio == 0.6
    assert (min(rival.ratios), max(rival.ratios)) == (0.5, 0.7)


def test_the_setting_that_was_fastest_at_first_counts() -> None:
    slow = replace(pair(0, 100, 50)[1], setting="unbound")
    seen = [*pair(0, 100, 80), slow, *pair(1, 100, 90)]
    assert chosen_setting(seen, ("S", "c8", "vllm")) == "bound"
    _, rival = cells(seen)
    assert [each.output_tokens_per_s for each in rival.best] == [80, 90]


def test_ours_before_another_rival_makes_no_pair() -> None:
    other = replace(SEEN, pair="hf", round=1, output_tokens_per_s=1e6)
    _, rival = cells([*pair(0, 100, 50), other])
    assert list(rival.ratios) == [0.5]


def test_an_observation_with_faults_counts_for_nothing() -> None:
    good, bad = pair(0, 100, 50)[1], pair(0, 100, 500)[1]
    seen = [SEEN, replace(bad, setting="unbound", faults={"cut": 3}), good]
    _, rival = cells(seen)
    assert (rival.ratio, rival.best[0].setting) == (0.5, "bound")


def test_files_say_who_wins_and_who_is_missing(tmp_path: Path) -> None:
    report = Report.begin(is_real_time=False)
    turns = [replace(each, workload="turns1", turn_ttft_ms=(9.0, 3.0)) for each in pair(0, 100, 50)]
    faulty = replace(SEEN, workload="c32", faults={"cut": 3})
    report.observations += [*pair(0, 100, 150), *pair(1, 100, 170), *turns, faulty]
    report.versions["vllm"] = "1.2"
    report.unavailable["hf"] = "no such wheel"
    report.failures.append(
        Failure(
            model="S", system="vllm", setting="bound", workloads=("c8",), round=2, reason="it ended"
        )
    )
    paths = write(report, tmp_path)
    assert [path.suffix for path in paths] == [".md", ".json", ".png"]
    assert all(path.stat().st_size for path in paths)

    text = paths[0].read_text("utf-8")
    winners = re.findall(r"^\| (\w+) +\| +\*\*(\w+)\*\*", text, re.MULTILINE)
    assert winners == [("c8", "vllm"), ("turns1", "penstock")]
    assert "1.50–1.70" in text
    assert "hf: no such wheel" in text
    assert "it ended" in text
    assert "cut ×3" in text

    data = json.loads(paths[1].read_text("utf-8"))
    assert {"machine", "commit", "cells", "unavailable"} <= data.keys()
    rival = next(cell for cell in data["cells"] if cell["system"] == "vllm")
    assert rival["settings"] == "bound: X=1"
    assert (rival["ratio_to_penstock"], rival["repeats"]) == (1.6, 2)
    assert data["cells"][-1]["turn_ttft_ms"] == [9.0, 3.0]


def test_the_json_is_all_there_is_and_says_what_was_not_reached(tmp_path: Path) -> None:
    report = Report.begin(is_real_time=True)
    report.observations += [*pair(0, 100, 50), replace(SEEN, model="M")]
    report.versions.update(penstock="1", vllm="2", hf="3")
    report.unavailable["hf"] = "no such wheel"
    report.failures.append(
        Failure(
            model="M", system="gone", setting="x", workloads=("c8",), round=0, reason="it ended"
        )
    )
    first, path, *_ = write(report, tmp_path / "first")
    again, *_ = write(Report.read(path), tmp_path / "again")
    assert again.read_text("utf-8") == first.read_text("utf-8")
    assert first.read_text("utf-8").rstrip().endswith("ended before\n\n- M vllm")


def test_a_rival_alone_has_figures_but_no_ratio(tmp_path: Path) -> None:
    report = Report.begin(is_real_time=True)
    report.observations.append(pair(0, 100, 50)[1])
    paths = write(report, tmp_path)
    [cell] = json.loads(paths[1].read_text("utf-8"))["cells"]
    assert (cell["output_tokens_per_s"], cell["ratio_to_penstock"]) == (50, None)


@pytest.mark.parametrize("comparison", RIVALS)
def test_the_readme_shows_the_newest_comparison(comparison: str) -> None:
    pattern = "*-peers.json" if comparison == "bf16" else f"*-peers-{comparison}.json"
    report = Report.read(max((RESULTS.parent / "results").glob(pattern)))
    assert report.comparison == comparison
    assert marked(RESULTS, marker(comparison)) == summary(cells(report.observations))


def test_more_than_one_means_that_ours_is_faster() -> None:
    text = summary(cells(pair(0, 300.0, 200.0)))
    row = text.splitlines()[-1]
    assert [part.strip() for part in row.split("|")[1:-1]] == ["S, 8 in flight", "300", "1.50×"]


def test_a_page_without_the_comments_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing here")
    with pytest.raises(AssertionError, match="lacks the comments"):
        replace_marked(page, marker("bf16"), "text")
