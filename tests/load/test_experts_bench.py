"""`penstock bench experts` on a small mixture: both models run, and a token's bytes are counted."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from penstock.load.bench import experts

TINY = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": 160, "num_experts": 6, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}  # fmt: skip


def test_both_models_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(experts.SHAPES, "small", TINY)
    parser = argparse.ArgumentParser()
    experts.add_arguments(parser)
    sizes = ["--num-seqs", "1,3", "--prompt-tokens", "9", "--output-tokens", "4", "--repeats", "1"]
    parsed = parser.parse_args(["--num-layers", "3", "--out", str(tmp_path), *sizes])
    assert experts.run(parsed) == 0
    data = json.loads((tmp_path / "experts.json").read_text())
    assert [cell["num_seqs"] for cell in data["cells"]] == [1, 3]
    attention, router, of_experts = 64 * (2 * 64 + 2 * 32), 64 * 6, 2 * 3 * 64 * 32
    read_bytes = 2 * (3 * (attention + router + of_experts) + 160 * 64)
    for cell in data["cells"]:
        assert cell["read_bytes"] == read_bytes
        rates = cell["prefill_tokens_per_s"]
        assert cell["prefill_share"] == rates["experts"] / rates["dense"]
    report = (tmp_path / "experts.md").read_text()
    assert "A token reads 0.000 GB of weights" in report
