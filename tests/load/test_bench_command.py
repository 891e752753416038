"""`penstock bench`: what it prints, and the files it leaves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageColor

from penstock.load.bench.commands import BENCHES
from penstock.load.report.plots import BLUE, ORANGE
from penstock.load.report.tables import table

from .conftest import Penstock

KV = ("bench", "kv", "--requests", "60", "--out")


@pytest.fixture(scope="module")
def kv(penstock: Penstock, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What `penstock bench kv` printed, and its folder."""
    out = tmp_path_factory.mktemp("kv") / "made" / "on the way"
    done = penstock(*KV, str(out))
    assert done.returncode == 0, done.stderr
    return done.stdout, out


def test_kv_prints_what_it_writes(kv: tuple[str, Path]) -> None:
    printed, out = kv
    assert sorted(path.name for path in out.iterdir()) == ["kv.json", "kv.md", "kv.png"]
    rows = [line for line in printed.splitlines() if line.startswith("| ")]
    assert len(rows) == 3 * (2 + 3 + 4)  # workloads × (header + contiguous + paged)
    assert set(rows) <= set((out / "kv.md").read_text().splitlines())


def test_kv_figures_are_those_of_the_table(kv: tuple[str, Path]) -> None:
    printed, out = kv
    main, half, short = json.loads((out / "kv.json").read_text())["workloads"]
    assert "max_tokens 1,024" in main["title"]
    assert "max_tokens 512" in half["title"]
    for workload in (main, half, short):
        assert len(workload["schemes"]) == 7
        for name, figures in workload["schemes"].items():
            assert figures["num_finished"] == 60
            assert f"{figures['num_steps']:,}" in printed
            assert figures["num_slots"] == 2048 * 16, name
    schemes = main["schemes"]
    assert schemes["paged, block 16"]["waste"] < 0.04 < schemes["prompt + exact output"]["waste"]


def test_the_picture_is_one(kv: tuple[str, Path]) -> None:
    with Image.open(kv[1] / "kv.png") as picture:
        assert picture.format == "PNG"
        assert min(picture.size) > 1000
        colours = picture.convert("RGB").getcolors(maxcolors=1 << 24)
    counts: dict[Any, int] = {colour: count for count, colour in colours or ()}
    for colour in (BLUE, ORANGE):  # areas, not lines
        assert counts[ImageColor.getrgb(colour)] > 10_000


def test_the_same_seed_gives_the_same_figures(penstock: Penstock, tmp_path: Path) -> None:
    figures = []
    for seed in ("0", "0", "1"):
        arguments = ("--requests", "12", "--block-size", "16", "--seed", seed)
        assert penstock(*KV, str(tmp_path), *arguments).returncode == 0
        figures.append((tmp_path / "kv.json").read_text())
    assert figures[0] == figures[1] != figures[2]


def test_without_matplotlib_the_table_is_still_printed(
    penstock: Penstock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = penstock(*KV, str(tmp_path), "--block-size", "16")
    assert done.returncode == 0
    assert "| paged, block 16" in done.stdout
    assert "pip install 'penstock-llm[bench]'" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kv.json", "kv.md"]


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (("--max-tokens", "2000"), "--max-model-len must hold"),
        (("--max-tokens", "1"), "--max-tokens must be at least"),
        (("--num-blocks", "4"), "cannot hold one request"),
        (("--requests", "0"), "--requests must be at least 1"),
        (("--block-size", "16,0"), "--block-size has the invalid value '16,0'"),
    ],
)
def test_settings_without_sense_are_refused(
    penstock: Penstock, tmp_path: Path, arguments: tuple[str, ...], fault: str
) -> None:
    done = penstock(*KV, str(tmp_path), *arguments)
    assert done.returncode == 2
    assert fault in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_bench_alone_lists_its_subcommands(penstock: Penstock) -> None:
    done = penstock("bench")
    assert done.returncode == 0
    for name in BENCHES:
        assert f"\n    {name}" in done.stdout


@pytest.mark.parametrize("name", BENCHES)
def test_each_bench_describes_itself(penstock: Penstock, name: str) -> None:
    described = penstock("bench", name, "--help")
    assert described.returncode == 0
    assert "--out" in described.stdout


def test_a_bench_is_imported_only_when_it_is_asked_for() -> None:
    program = (
        "import sys\n"
        "from penstock.gateway.launch.cli import main\n"
        "main(['bench'])\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('torch', 'matplotlib')"
        " or name.startswith('penstock.load.')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=True
    )
    assert done.stdout.splitlines()[-1] == "['penstock.load.bench', 'penstock.load.bench.commands']"


def test_policy_measures_what_a_pool_can_hold(penstock: Penstock, tmp_path: Path) -> None:
    arguments = ("--sequences", "4,64", "--num-blocks", "60", "--steps", "20")
    done = penstock("bench", "policy", *arguments, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (cost,) = json.loads((tmp_path / "policy.json").read_text())["costs"]
    assert (cost["num_sequences"], cost["num_blocks"]) == (4, 60)
    assert 0 < cost["schedule_ms"] < cost["total_ms"] <= cost["p99_ms"]
    assert [line.split("|")[2].strip() for line in done.stdout.splitlines() if "| 64" in line] == [
        "–",
        "–",
    ]


@pytest.mark.exhaustive
def test_overload_gives_every_request_its_own_tokens(penstock: Penstock, tmp_path: Path) -> None:
    arguments = ("--concurrency", "2", "--repeat", "1", "--out", str(tmp_path))
    done = penstock("bench", "overload", *arguments)
    # 1 would mean that some request got other tokens than unpressed.
    assert done.returncode == 0, done.stdout + done.stderr
    cases = {
        case["name"]: case for case in json.loads((tmp_path / "overload.json").read_text())["cases"]
    }
    for name in ("unpressed", "roomy"):
        assert cases[name]["num_swaps"] == cases[name]["num_recomputes"] == 0
    swap, recompute = cases["pressed, swap"], cases["pressed, recompute"]
    assert swap["num_swaps"] > 0
    assert swap["num_fallbacks"] == 0
    assert swap["swapped_in_bytes"] > 0
    assert recompute["num_recomputes"] > 0
    assert recompute["num_swaps"] == 0


def test_a_table_reads_in_a_terminal_too() -> None:
    assert table(["name", "n"], [["a", "1,000"], ["long name", "2"]]).splitlines() == [
        "| name      |     n |",
        "| --------- | ----: |",
        "| a         | 1,000 |",
        "| long name |     2 |",
    ]
