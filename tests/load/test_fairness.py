"""`penstock bench fairness`: a real server and two tenants; its figures are not judged here."""

from __future__ import annotations

import argparse
import json
import multiprocessing
from pathlib import Path

import pytest

from penstock.load.bench import fairness


@pytest.mark.exhaustive
def test_it_tells_the_small_tenants_waits_and_the_floods_tokens(tmp_path: Path) -> None:
    flags = "--concurrency 1 --times 8 --max-num-seqs 8 --seconds 0.5"
    parser = argparse.ArgumentParser()
    fairness.add_arguments(parser)
    assert fairness.run(parser.parse_args([*flags.split(), "--out", str(tmp_path)])) in (0, 1)
    alone, flooded = json.loads((tmp_path / "fairness.json").read_text())["runs"]
    for wait in (alone, flooded):
        assert wait["num_streams"] > 0
        assert wait["num_faulty"] == 0
        assert 0.0 < wait["median_ms"] <= wait["p99_ms"]
    assert (alone["flood_streams"], flooded["flood_streams"]) == (0, 8)
    assert alone["flood_tokens_per_s"] == 0.0
    assert flooded["flood_tokens_per_s"] > 0.0
    assert multiprocessing.active_children() == []  # the flood ends with the bench
