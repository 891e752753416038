"""The startup bench: real starts, their parts, and the tables made of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.errors import ConfigError
from penstock.load.bench.startup import (
    ProbedModel,
    Start,
    Startup,
    markdown,
    parse_import_times,
    start_alone,
)
from penstock.load.launch import Memory

from .conftest import Penstock

DEMO = ProbedModel(model="demo", dtype="auto")
LONG_S = 300.0  # no start takes that, on whatever machine
FAMILY = ["engine", "gateway", "supervisor"]
IMPORT_TIMES = """\
import time: self [us] | cumulative | imported package
import time:       100 |        100 |   torch._C
import time:      1000 |       3600 | torch
import time:      2500 |       2500 |   sympy.core
import time: nonsense
a line of the program's own
import time:       400 |        400 |     penstock.engine
"""


@pytest.fixture(scope="module")
def bench(
    penstock: Penstock, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[str, Any]]:
    """What one measured start printed, and its figures."""
    out = tmp_path_factory.mktemp("startup")
    done = penstock("bench", "startup", "--repeats", "1", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.splitlines()) > set((out / "startup.md").read_text().splitlines()[2:])
    return done.stdout, json.loads((out / "startup.json").read_text())


@pytest.mark.exhaustive
def test_a_start_is_timed_to_its_first_token(bench: tuple[str, dict[str, Any]]) -> None:
    printed, figures = bench
    (start,) = figures["starts"]
    assert 0.2 < start["ready_s"] < LONG_S
    assert 0.0 < start["first_token_s"] < LONG_S
    assert f"{start['ready_s']:.2f}" in printed
    for memory in (start["idle"], start["used"]):
        assert sorted(memory) == FAMILY
    assert start["used"]["engine"]["resident_bytes"] > start["idle"]["engine"]["unique_bytes"]


@pytest.mark.exhaustive
def test_a_start_has_its_parts(bench: tuple[str, dict[str, Any]]) -> None:
    _, figures = bench
    (gateway,), (engine,) = figures["alone_s"]["gateway"], figures["alone_s"]["engine"]
    assert set(gateway) == {"interpreter", "imports", "tokenizer and app"}
    assert set(engine) == {
        "interpreter", "import torch", "imports", "weights", "KV cache", "the rest"
    }  # fmt: skip
    for parts in (gateway, engine):
        assert all(0.0 < seconds < LONG_S for seconds in parts.values())


@pytest.mark.exhaustive
def test_imports_are_told_by_package(bench: tuple[str, dict[str, Any]]) -> None:
    _, figures = bench
    engine, gateway = figures["imports_s"]["engine"], figures["imports_s"]["gateway"]
    assert {"torch", "penstock"} <= set(engine)
    assert list(engine.values()) == sorted(engine.values(), reverse=True)
    assert "torch" not in gateway
    assert {"penstock", "starlette", "tokenizers"} <= set(gateway)


def test_import_times_are_summed_by_package() -> None:
    assert list(parse_import_times(IMPORT_TIMES).items()) == [
        ("sympy", 0.0025),
        ("torch", 0.0011),
        ("penstock", 0.0004),
    ]


@pytest.mark.exhaustive
def test_a_model_that_cannot_be_loaded_is_said(tmp_path: Path) -> None:
    nowhere = ProbedModel(model=str(tmp_path / "nowhere"), dtype="auto")
    with pytest.raises(ConfigError, match=r"(?s)the gateway did not start alone.*not a directory"):
        start_alone("gateway", nowhere)


def test_the_probe_begins_with_the_standard_library_alone() -> None:
    """Else what it imports would be missing in the parts."""
    program = (
        "import sys, penstock.load.bench.startup_probe\n"
        "print([name for name in sys.modules if name.split('.')[0] in"
        " ('torch', 'numpy', 'pydantic', 'msgpack') or name.startswith('penstock.engine')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_tables_show_medians_and_ranges() -> None:
    def memory(num: int) -> Memory:
        mebibyte = 1 << 20
        return Memory(
            resident_bytes=30 * num * mebibyte,
            proportional_bytes=20 * num * mebibyte,
            unique_bytes=10 * num * mebibyte,
        )

    starts = [
        Start(
            ready_s=ready_s,
            first_token_s=0.25,
            idle={"supervisor": memory(1), "engine": memory(num)},
            used={"supervisor": memory(1), "engine": memory(2 * num)},
        )
        for ready_s, num in ((2.0, 5), (4.0, 7), (3.0, 6))
    ]
    text = markdown(
        DEMO,
        Startup(
            starts=starts,
            alone={"gateway": [{"imports": 0.5}], "engine": [{"imports": 1.0, "weights": 0.5}]},
            imports={"gateway": {"jinja2": 0.03}, "engine": {"torch": 1.5, "sympy": 0.5}},
        ),
    )
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    for row in (
        ["ready", "3.00", "2.00–4.00"],
        ["first token", "3.25", "2.25–4.25"],
        ["imports", "0.50", "0.50–0.50", "1.00", "1.00–1.00"],
        ["weights", "–", "–", "0.50", "0.50–0.50"],
        ["in all", "0.50", "0.50–0.50", "1.50", "1.50–1.50"],
        ["jinja2", "30", "torch", "1,500"],
        ["–", "–", "sympy", "500"],
        ["in all", "30", "in all", "2,000"],
        ["engine", "180", "120", "60", "360"],
        ["together", "–", "140", "70", "–"],
    ):
        assert row in cells


def test_without_the_extra_a_bench_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['psutil'] = None\n"
        "from penstock.gateway.launch.cli import main\n"
        "main(['bench', 'startup'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.endswith("bench startup needs psutil: pip install 'penstock-llm[bench]'\n")
    assert "Traceback" not in done.stderr
