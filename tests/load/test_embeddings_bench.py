"""The bench of embeddings, on a few short texts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .conftest import Penstock


@pytest.mark.exhaustive
def test_what_it_measures(penstock: Penstock, tmp_path: Path) -> None:
    flags = "--num-texts 12 --lengths 2,20 --repeats 1 --batch-size 4 --dtype float32"
    done = penstock("bench", "embeddings", "--out", str(tmp_path), *flags.split())
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "embeddings.json").read_text())
    assert figures["num_texts"] == 12
    assert len(figures["seconds"]) == 3
    assert min(figures["ratios"].values()) > 0 < min(figures["cpu_seconds"].values())
    assert figures["least_cosine"] > 0.9999
    assert min(figures["least_cosine_float64"].values()) > 0.9999
    assert figures["is_same_alone"]
