"""The bench of models through transformers, on the demo model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.load.bench.backend import ratios

from .conftest import Penstock


@pytest.mark.exhaustive
def test_what_it_measures(penstock: Penstock, tmp_path: Path) -> None:
    flags = "--model demo --prompt-tokens 4 --output-tokens 4 --repeats 1 --starts 1"
    done = penstock("bench", "backend", "--out", str(tmp_path), *flags.split())
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "backend.json").read_text())
    assert figures["output_tokens_per_s"].keys() == {"native", "transformers", "generate"}
    assert figures["ready_s"].keys() == {"native", "transformers"}
    assert min(figures["import_s"]) > 0
    assert "times as fast as natively" in done.stdout


def test_ratios_are_of_neighbours() -> None:
    rates = {"native": [4.0, 8.0, 1.0], "transformers": [2.0, 6.0, 1.0], "generate": [1.0] * 3}
    ready = {"native": [1.0, 2.0], "transformers": [3.0, 3.0]}
    assert ratios(rates, ready, [2.0]) == {
        "speed to native": 0.75,
        "speed to generate": 2.0,
        "ready without the import": 0.75,
    }
