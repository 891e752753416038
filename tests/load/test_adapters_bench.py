"""`penstock bench adapters` on the demo model: what it measures and leaves."""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path

import pytest

from penstock.engine.lora.slots import AdapterSlots
from penstock.engine.request import Adapter
from penstock.load.bench import adapters


@pytest.mark.exhaustive
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


def test_streams_are_timed_while_adapters_are_loaded(tmp_path: Path, monkeypatch) -> None:
    read: list[str] = []
    load = AdapterSlots.load

    def counted(slots: AdapterSlots, adapter: Adapter) -> None:
        read.append(adapter.name)
        load(slots, adapter)

    monkeypatch.setattr(AdapterSlots, "load", counted)
    parser = argparse.ArgumentParser()
    adapters.add_arguments(parser)
    options = ["--num-seqs", "1,2", "--rank", "4", "--prompt-tokens", "3", "--loads", "3"]
    parsed = parser.parse_args([*options, "--repeats", "1", "--out", str(tmp_path)])
    assert adapters.run(parsed) == 0
    found = json.loads((tmp_path / "adapter-loads.json").read_text())["cases"]
    assert [each["num_seqs"] for each in found] == [1, 2]
    for each in found:
        assert each["longest_ms"][0] >= each["median_ms"] > 0
        assert each["loading_longest_ms"][0] >= each["loading_median_ms"] > 0
    assert len(read) == 12
    assert all(before != after for before, after in itertools.pairwise(read))
