"""`penstock bench adapters` on the demo model: what it measures and leaves."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from penstock.load.bench import adapters


def test_each_case_is_measured_beside_an_engine_without(tmp_path: Path, capsys) -> None:
    parser = argparse.ArgumentParser()
    adapters.add_arguments(parser)
    options = ["--num-seqs", "1,2", "--rank", "4", "--prompt-tokens", "3", "--output-tokens", "4"]
    parsed = parser.parse_args([*options, "--repeats", "1", "--out", str(tmp_path)])
    assert adapters.run(parsed) == 0
    found = json.loads((tmp_path / "adapters.json").read_text())["cases"]
    assert [(each["num_seqs"], each["case"]) for each in found] == [
        (1, "no adapter"), (1, "one adapter"),
        (2, "no adapter"), (2, "one adapter"), (2, "different adapters"),
    ]  # fmt: skip
    for each in found:
        assert each["ratio"] == each["tokens_per_s"] / each["plain_tokens_per_s"] > 0
    assert "different adapters" in capsys.readouterr().out
