"""`penstock bench kernels` on a CPU: its arithmetic, its checks, and what it leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from penstock.engine.config import KV_CACHE_DTYPES, QUANTIZATIONS
from penstock.kernels.cache_folder import CACHE_VARIABLE
from penstock.kernels.cpu.library import load_library
from penstock.load.kernels.command import CaseMaker, measure
from penstock.load.limits import Ceilings, products_per_s, read_bytes_per_s

from .conftest import Penstock

SMALL = ("--features", "64", "--rows", "1,5", "--context", "40", "--repeats", "1",
         "--copies-mib", "1")  # fmt: skip
CEILINGS = Ceilings(read_bytes_per_s=1e9, products_per_s=1e12)


@pytest.fixture(scope="module")
def maker() -> CaseMaker:
    library = load_library(torch.bfloat16)
    assert library is not None
    return CaseMaker(library=library, min_bytes=1 << 16)


def test_bytes_and_products_are_those_of_the_shapes(maker: CaseMaker) -> None:
    linear = maker.linear(8, 64, 256)
    assert linear.num_bytes == 2 * (8 * 64 + 64 * 256 + 8 * 256)
    assert linear.num_products == 8 * 64 * 256
    assert len(linear.copies) == 2  # more than 64 KiB
    in_int4 = maker.linear(8, 64, 256, kind="int4")
    assert in_int4.num_bytes == 2 * (8 * 64 + 8 * 256) + 64 * 256 // 2 + 4 * 256
    attention = maker.decode_attention(3, 40)
    assert attention.num_bytes == 2 * 3 * 128 * 2 * (32 + 40 * 8)
    in_int8 = maker.decode_attention(3, 40, kv_cache_dtype="int8")
    assert in_int8.num_bytes == 2 * 3 * (2 * 128 * 32 + 132 * 40 * 8)


def test_the_limit_is_whatever_takes_longer() -> None:
    assert CEILINGS.bound_s(1000, 1000) == pytest.approx(1e-6)
    assert CEILINGS.bound_s(1000, 1_000_000_000) == pytest.approx(1e-3)


def test_every_kernel_is_timed(maker: CaseMaker) -> None:
    cases = (
        *(maker.linear(5, 64, 256, kind=kind) for kind in QUANTIZATIONS),
        *(maker.decode_attention(3, 40, kv_cache_dtype=kind) for kind in KV_CACHE_DTYPES),
    )  # fmt: skip
    for case in cases:
        cost = measure(case, CEILINGS, repeats=1)
        assert cost["ours_s"] > 0
        assert cost["torch_s"] > 0


def test_every_kind_of_weights_has_a_rate() -> None:
    library = load_library(torch.bfloat16)
    assert library is not None
    for kind in QUANTIZATIONS:
        for in_bytes in (True, False):
            assert products_per_s(library, kind, in_bytes=in_bytes, num_passes=1) > 0.0
    assert read_bytes_per_s(library, 3 << 20, num_passes=1) > 0.0  # which adds up what it reads


@pytest.mark.exhaustive
def test_it_prints_what_it_writes(penstock: Penstock, tmp_path: Path) -> None:
    done = penstock("bench", "kernels", *SMALL, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    data = json.loads((tmp_path / "kernels.json").read_text())
    assert data["dtype"] == "bfloat16"
    assert min(data["ceilings"].values()) > 0
    names = [cost["name"] for cost in data["costs"]]
    assert len(names) == 4 * 2 + 6  # linear, attention
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert [row.split("|")[1].strip() for row in rows[2:]] == names
    assert set(rows) <= set((tmp_path / "kernels.md").read_text().splitlines())


def test_without_a_compiler_there_is_nothing_to_measure(
    penstock: Penstock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    done = penstock("bench", "kernels", *SMALL, "--out", str(tmp_path / "out"))
    assert done.returncode == 2
    assert "no C kernels" in done.stderr
    assert not (tmp_path / "out").exists()
