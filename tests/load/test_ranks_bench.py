"""`penstock bench ranks` on the demo model: what it measures and leaves."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from penstock.load.bench import ranks


@pytest.mark.exhaustive
def test_ranks_are_measured_beside_one(tmp_path: Path, capsys) -> None:
    parser = argparse.ArgumentParser()
    ranks.add_arguments(parser)
    options = ["--num-seqs", "1,2", "--prompt-tokens", "3", "--output-tokens", "4"]
    parsed = parser.parse_args([*options, "--repeats", "1", "--out", str(tmp_path)])
    assert ranks.run(parsed) == 0
    found = json.loads((tmp_path / "ranks.json").read_text())
    assert [each["num_seqs"] for each in found["decoding"]] == [1, 2]
    for each in found["decoding"]:
        assert each["ratio"] == each["tokens_per_s"] / each["one_rank_tokens_per_s"] > 0
        stages_ratio = each["stages_tokens_per_s"] / each["one_rank_tokens_per_s"]
        assert each["stages_ratio"] == stages_ratio > 0
    assert [each["size"] for each in found["sums"]] == [896, 2048, 4096]
    assert all(each["percentile_90_us"] >= each["median_us"] > 0 for each in found["sums"])
    assert "tok/s, 2 ranks" in capsys.readouterr().out
