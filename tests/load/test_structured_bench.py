"""The bench of structured outputs, on a few schemas."""

from __future__ import annotations

import json
from pathlib import Path

from penstock.load.workloads.json_schemas import KINDS, json_schemas

from .conftest import Penstock


def test_what_it_measures(penstock: Penstock, tmp_path: Path) -> None:
    flags = "--num-schemas 16 --max-tokens 64 --num-seqs 2 --output-tokens 8 --repeats 1"
    done = penstock("bench", "structured", "--out", str(tmp_path), *flags.split())
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "structured.json").read_text())
    assert figures["accepted"] == 14
    assert sum(figures["refused"].values()) == 2
    assert sum(figures["ends"].values()) == 14
    assert figures["wrong"] == []
    assert figures["mask_mean_us"] > 0
    assert figures["speed"][0]["num_seqs"] == 2


def test_the_set_is_the_seeds() -> None:
    schemas = json_schemas(40, seed=3)
    assert schemas == json_schemas(40, seed=3) != json_schemas(40, seed=4)
    assert {each.kind for each in schemas} == KINDS.keys()
