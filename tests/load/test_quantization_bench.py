"""The quantization bench: speeds beside what the machine allows."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import cast

import pytest
import torch

from penstock.engine.config import QUANTIZATIONS, Quantization
from penstock.engine.transport.messages import EngineInfo
from penstock.kernels.cpu.library import load_library
from penstock.load.bench import quantization
from penstock.load.cpu_limits import Ceilings, ReadWeights, products_per_s
from penstock.load.engine_runs import Lengths, Run, Step

from .conftest import Penstock


@pytest.mark.exhaustive
def test_it_prints_and_writes_what_it_measured(penstock: Penstock, tmp_path: Path) -> None:
    arguments = ("--num-seqs", "1,3", "--prompt-tokens", "16", "--output-tokens", "8",
                 "--repeats", "2", "--out", str(tmp_path))  # fmt: skip
    done = penstock("bench", "quantization", *arguments)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert len(rows) == (2 + 2 * 3) + (2 + 2 * 2 * 3)
    assert set(rows) <= set((tmp_path / "quantization.md").read_text().splitlines())
    figures = json.loads((tmp_path / "quantization.json").read_text())
    assert figures["model"] == "demo"
    cells = [(cell["num_seqs"], cell["quantization"]) for cell in figures["speed"]]
    assert cells == list(product([1, 3], ["none", "int8", "int4"]))
    sizes = [cell["weight_bytes"] for cell in figures["speed"][:3]]
    assert sizes[0] > 1.5 * sizes[1] > 2.2 * sizes[2]
    assert all(cell["ratio"] > 0.0 for cell in figures["speed"])
    kinds = ["none", "int8", "int4"]
    assert list(figures["ceilings"]) == kinds
    limits = figures["limits"]
    cells = [(each["phase"], each["num_seqs"], each["quantization"]) for each in limits]
    assert cells == list(product(["decode", "prefill"], [1, 3], kinds))
    for each in limits:
        ceilings = figures["ceilings"][each["quantization"]]
        least_s = max(
            each["num_bytes"] / ceilings["read_bytes_per_s"],
            each["num_products"] / ceilings["products_per_s"],
        )
        assert 0.0 < each["bound_tokens_per_s"] == pytest.approx(each["num_tokens"] / least_s)
        assert 0.0 < each["share"] == each["tokens_per_s"] / each["bound_tokens_per_s"]
    assert [each["num_tokens"] for each in limits[::3]] == [1, 3, 16, 3 * 16]


def test_limits_are_those_of_all_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """10 numbers in layers meet every token, 4 in the head the tokens after which one is drawn."""
    read = ReadWeights(num_in_layers=10, num_in_head=4, num_bytes=28)
    monkeypatch.setattr(quantization, "read_weights", lambda info: read)
    steps = [
        Step(phase="prefill", step_s=5.0, num_tokens=2),
        Step(phase="decode", step_s=2.0, num_tokens=2),
    ]
    run = Run(lengths=Lengths(prompt_tokens=5, output_tokens=2), steps=steps, tokens=[[1, 1]] * 2)
    ceilings = Ceilings(read_bytes_per_s=28.0, products_per_s=36.0)
    infos = cast("dict[Quantization, EngineInfo]", {"none": None})
    decode, prefill = quantization._limits({2: [{"none": run}]}, infos, {"none": ceilings})
    names = ("num_bytes", "num_products", "bound_tokens_per_s", "tokens_per_s", "share")
    assert [decode[name] for name in names] == [28, 2 * 14, 2.0, 1.0, 0.5]
    assert [prefill[name] for name in names] == pytest.approx([28, 108, 10 / 3, 2.0, 0.6])


def test_every_kernel_has_a_rate() -> None:
    library = load_library(torch.bfloat16)
    assert library is not None
    for kind, in_bytes in product(QUANTIZATIONS, (True, False)):
        assert products_per_s(library, kind, in_bytes=in_bytes, num_passes=1) > 0.0
