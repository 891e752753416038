"""The README's tables of rivals are what the command makes of the newest comparisons."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.load.peers.readme import README, marker, summary
from penstock.load.peers.report import Observation, Report, cells
from penstock.load.peers.rivals import RIVALS
from penstock.load.report.tables import marked, replace_marked

RESULTS = README.parent / "results"


@pytest.mark.parametrize("comparison", RIVALS)
def test_the_readme_shows_the_newest_comparison(comparison: str) -> None:
    pattern = "*-peers.json" if comparison == "bf16" else f"*-peers-{comparison}.json"
    report = Report.read(max(RESULTS.glob(pattern)))
    assert report.comparison == comparison
    assert marked(README, marker(comparison)) == summary(cells(report.observations))


def observation(system: str, tokens_per_s: float) -> Observation:
    return Observation(
        model="S",
        workload="c8",
        system=system,
        setting="default",
        flags="",
        round=0,
        pair="vllm",
        output_tokens_per_s=tokens_per_s,
        ttft_ms_p50=1.0,
        ttft_ms_p99=1.0,
        itl_ms_p50=1.0,
        itl_ms_p99=1.0,
    )


def test_more_than_one_means_that_ours_is_faster() -> None:
    text = summary(cells([observation("penstock", 300.0), observation("vllm", 200.0)]))
    row = text.splitlines()[-1]
    assert [part.strip() for part in row.split("|")[1:-1]] == ["S, 8 in flight", "300", "1.50×"]


def test_a_page_without_the_comments_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing here")
    with pytest.raises(AssertionError, match="lacks the comments"):
        replace_marked(page, marker("bf16"), "text")
