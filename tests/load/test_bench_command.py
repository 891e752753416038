"""`penstock bench`: which benches there are, and what each says of itself."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest

from penstock.gateway.launch import benches
from penstock.load.report.tables import table

from .conftest import Penstock

NAMES = ("engine", "gateway", "kernels", "quality", "serve", "soak", "startup")


def test_bench_alone_lists_its_subcommands_with_a_sentence_each(penstock: Penstock) -> None:
    done = penstock("bench")
    assert done.returncode == 0
    assert tuple(benches.find_benches()) == NAMES
    for name in NAMES:
        assert f"\n    {name}" in done.stdout
    for module in benches.find_benches().values():
        assert len(benches._described(module)) > 20, module


@pytest.mark.parametrize("name", NAMES)
def test_each_bench_describes_itself(penstock: Penstock, name: str) -> None:
    described = penstock("bench", name, "--help")
    assert described.returncode == 0
    assert "--out" in described.stdout


def test_what_a_wheel_leaves_out_is_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        metadata.EntryPoint(name, value, benches.GROUP)
        for name, value in (
            ("serve", "penstock.load.serve"),
            ("absent", "penstock.load.absent"),
            ("deep", "penstock.absent.command"),
        )
    ]
    monkeypatch.setattr(benches.metadata, "entry_points", lambda group: points)
    assert benches.find_benches() == {"serve": "penstock.load.serve"}


def test_a_bench_is_imported_only_when_it_is_asked_for() -> None:
    program = (
        "import sys\n"
        "from penstock.gateway.launch.cli import main\n"
        "main(['bench'])\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('torch',)"
        " or name in ('penstock.load.serve', 'penstock.load.engine')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_table_reads_in_a_terminal_too() -> None:
    assert table(["name", "n"], [["a", "1,000"], ["long name", "2"]]).splitlines() == [
        "| name      |     n |",
        "| --------- | ----: |",
        "| a         | 1,000 |",
        "| long name |     2 |",
    ]
