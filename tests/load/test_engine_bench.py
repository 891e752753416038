"""The engine bench: tokens counted, time put where it was spent, figures that follow from it."""

from __future__ import annotations

import json
import statistics
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import replace
from operator import truediv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from PIL import Image, ImageColor
from safetensors.torch import load_file

from penstock.engine.config import CacheConfig, EngineConfig, SchedulerConfig
from penstock.engine.engine_core import EngineCore
from penstock.engine.errors import ConfigError
from penstock.engine.models.cpu_decoder import CpuDecoder
from penstock.engine.models.language_model import DrawnTokens
from penstock.engine.models.registry import read_model_config
from penstock.engine.runner.input_batch import InputBatch
from penstock.engine.scheduling import Scheduler
from penstock.engine.startup import build_core
from penstock.engine.transport.messages import EngineInfo
from penstock.load import engine_runs as runs
from penstock.load import machine
from penstock.load.bench import engine as engine_bench
from penstock.load.bench import engine as pages
from penstock.load.bench.engine import Cell, StepBytes, measure, memory_use, split
from penstock.load.engine_runs import OTHER, PARTS, Lengths, Phase, Run, Step
from penstock.load.memory_rate import MemoryReader
from penstock.load.report.plots import BLUE, ORANGE

from .conftest import Penstock

LENGTHS = Lengths(prompt_tokens=24, output_tokens=12)
TAKES_S = 0.004


@pytest.fixture(scope="module")
def engine() -> Iterator[tuple[EngineCore, EngineInfo]]:
    """The demo model; three prompts of 24 tokens do not fit into one step."""
    core, info = build_core(
        EngineConfig(
            cache=CacheConfig(num_blocks=256),
            scheduler=SchedulerConfig(max_num_batched_tokens=60),
        )
    )
    yield core, info
    core.close()


@pytest.fixture(scope="module")
def cells(engine: tuple[EngineCore, EngineInfo]) -> list[Cell]:
    return measure(*engine, LENGTHS, num_seqs=(1, 4), repeats=2, seed=0)


def test_every_token_is_counted_once(cells: list[Cell]) -> None:
    assert [cell.num_seqs for cell in cells] == [1, 4]
    for cell in cells:
        assert len(cell.runs) == len(cell.split_runs) == 2
        for run in (*cell.runs, *cell.split_runs):
            assert [len(tokens) for tokens in run.tokens] == [12] * cell.num_seqs
            assert sum(step.num_tokens for step in run.steps) == 12 * cell.num_seqs


def test_while_decoding_all_sequences_take_a_token(cells: list[Cell]) -> None:
    alone, together = (cell.runs[0] for cell in cells)
    assert [step.num_tokens for step in alone.phase("prefill")] == [1]
    assert [step.num_tokens for step in alone.phase("decode")] == [1] * 11
    # 60 tokens: two prompts and half of the third, which then has to wait for its rest.
    assert [step.num_tokens for step in together.phase("prefill")] == [2, 4]
    assert {step.num_tokens for step in together.phase("decode")} == {4}
    assert sum(step.num_tokens for step in together.phase("tail")) == 2


def test_the_parts_are_the_whole_step(cells: list[Cell]) -> None:
    for cell in cells:
        assert all(not step.parts_s for run in cell.runs for step in run.steps)
        for run in cell.split_runs:
            for step in (*run.phase("prefill"), *run.phase("decode")):
                assert tuple(step.parts_s) == PARTS
                assert sum(step.parts_s.values()) == pytest.approx(step.step_s)
                assert min(step.parts_s.values()) > 0.0, "of none, or counted twice"


def test_prompts_differ_from_run_to_run(cells: list[Cell]) -> None:
    # Equal ones would be found in the prefix cache, and prefill would look fast.
    runs = [run.tokens for cell in cells for run in (*cell.runs, *cell.split_runs)]
    assert len({str(tokens) for tokens in runs}) == len(runs)


def test_timing_leaves_the_engine_as_it_was(cells: list[Cell]) -> None:
    del cells
    for call in (Scheduler.schedule, Scheduler.update, CpuDecoder.step, DrawnTokens.read):
        assert not hasattr(call, "__wrapped__"), call


@pytest.mark.parametrize(
    ("owner", "name", "part"),
    [
        (Scheduler, "schedule", "schedule"),
        (InputBatch, "prepare", "prepare"),
        (CpuDecoder, "step", "forward"),
        (DrawnTokens, "read", "sample"),
        (Scheduler, "update", "update"),
        (InputBatch, "append", OTHER),
    ],
)
def test_time_is_put_where_it_was_spent(
    engine: tuple[EngineCore, EngineInfo],
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    part: str,
) -> None:
    original, now_s = getattr(owner, name), [0.0]

    def slow(*args: Any, **settings: Any) -> Any:
        now_s[0] += TAKES_S
        return original(*args, **settings)

    monkeypatch.setattr(owner, name, slow)
    for module in (machine, runs):  # time stands still but for this
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now_s[0]))
    (cell,) = measure(*engine, LENGTHS, num_seqs=(1,), repeats=1, seed=1)
    parts = split(cell.split_steps("decode"))
    assert parts[part].median_ms >= 1e3 * TAKES_S
    others = [parts[other].median_ms for other in PARTS if other != part]
    assert others == pytest.approx([0.0] * len(others))


def test_an_engine_without_a_tokenizer_is_measured_too(
    engine: tuple[EngineCore, EngineInfo], cells: list[Cell], tmp_path: Path
) -> None:
    core, info = engine
    lengths = replace(LENGTHS, output_tokens=4)
    bare = msgspec.structs.replace(info, model_path=str(tmp_path))
    (cell,) = measure(core, bare, lengths, num_seqs=(1,), repeats=1, seed=0)
    assert cell.detokenize_s_per_token is None
    assert all((with_text.detokenize_s_per_token or 0.0) > 0.0 for with_text in cells)


# -- what follows from steps ------------------------------------------------------------------


def step(phase: Phase, num_tokens: int, **parts_ms: float) -> Step:
    parts_s = {part: parts_ms.get(part, 0.0) / 1e3 for part in PARTS}
    return Step(phase=phase, step_s=sum(parts_s.values()), num_tokens=num_tokens, parts_s=parts_s)


def test_figures_of_known_steps() -> None:
    run = Run(
        lengths=Lengths(prompt_tokens=100, output_tokens=4),
        steps=[
            step("prefill", 2, forward=50.0),
            step("decode", 2, schedule=1.0, prepare=1.0, forward=6.0, update=1.0, other=1.0),
            step("decode", 2, schedule=3.0, forward=7.0),
            step("tail", 2, forward=30.0),
        ],
        tokens=[[1] * 4, [1] * 4],
    )
    assert run.output_tokens_per_s == pytest.approx(8 / 0.1)
    assert run.prefill_tokens_per_s == pytest.approx(200 / 0.05)
    assert run.decode_tokens_per_s == pytest.approx(4 / 0.02)
    parts = split(run.phase("decode"))
    assert parts["schedule"].median_ms == pytest.approx(2.0)
    assert parts["schedule"].p99_ms == pytest.approx(2.98)
    assert parts["schedule"].share == pytest.approx(0.2)
    assert parts["step"].mean_ms == pytest.approx(10.0)
    assert sum(parts[part].share for part in PARTS) == pytest.approx(1.0)
    cell = Cell(num_seqs=2, runs=[run], split_runs=[run], detokenize_s_per_token=None)
    assert cell.policy_share() == pytest.approx(6 / 20)
    with_text = replace(cell, detokenize_s_per_token=0.001)  # four tokens
    assert with_text.policy_share() == pytest.approx((6 + 4) / (20 + 4))


def test_what_a_step_reads_of_memory(engine: tuple[EngineCore, EngineInfo]) -> None:
    _, info = engine
    _, model = read_model_config(Path(info.model_path))
    weights = load_file(Path(info.model_path) / "model.safetensors").values()
    assert (model.is_tied, info.dtype) == (True, "bfloat16")  # so that all matrices are read
    num_weights = sum(weight.numel() for weight in weights if weight.dim() == 2)
    run = Run(
        lengths=Lengths(prompt_tokens=100, output_tokens=20),
        steps=[step("prefill", 3, forward=9.0), step("decode", 3, forward=2.0, sample=2.0)],
        tokens=[[1]] * 3,
    )
    faster = replace(run, steps=[step("decode", 3, forward=1.0)])
    use = memory_use(info, [run, faster, faster], [1e9, 2e9, 3e9])
    kv_bytes = 2 * model.num_layers * model.num_kv_heads * model.head_dim * 2
    assert use.step_bytes == StepBytes(weights=2 * num_weights, kv=3 * 110 * kv_bytes)
    total = use.step_bytes.weights + use.step_bytes.kv
    assert use.rates == pytest.approx([total / 0.004, total / 0.001, total / 0.001])
    assert use.share == pytest.approx(total / 0.001 / 3e9)  # the middle one
    int4 = msgspec.structs.replace(info, quantization="int4", weight_bytes=num_weights // 2)
    assert memory_use(int4, [run], [1e9]).step_bytes.weights == num_weights // 2  # tied


def test_memory_is_read_by_all_threads() -> None:
    before = set(threading.enumerate())
    with MemoryReader(2, num_bytes=4 << 20) as reader:
        began_s = time.perf_counter()
        rate = reader.measure(num_passes=3)
        # The best of three passes is no slower than all of them together.
        assert 3 * (4 << 20) / (time.perf_counter() - began_s) <= rate < 1e13
        assert len(set(threading.enumerate()) - before) == 2
    assert set(threading.enumerate()) <= before


# -- the command ------------------------------------------------------------------------------


def test_it_prints_and_writes_what_it_measured(penstock: Penstock, tmp_path: Path) -> None:
    arguments = ("--num-seqs", "1,3", "--prompt-tokens", "16", "--output-tokens", "8",
                 "--repeats", "2", "--deterministic", "--plot", "--out", str(tmp_path))  # fmt: skip
    done = penstock("bench", "engine", *arguments)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "engine.json",
        "engine.md",
        "engine.png",
    ]
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert len(rows) == 2 * (2 + 2) + 2 * (2 + len(PARTS) + 1)
    assert set(rows) <= set((tmp_path / "engine.md").read_text().splitlines())
    assert "of a decode step with 3 sequences" in done.stdout
    figures = json.loads((tmp_path / "engine.json").read_text())
    assert (figures["model"], figures["num_threads"] >= 1) == ("demo", True)
    for cell, num_seqs in zip(figures["cells"], (1, 3), strict=True):
        assert cell["num_seqs"] == num_seqs
        assert cell["num_output_tokens"] == 8 * num_seqs
        assert cell["num_decode_steps"] == 2 * 7
        assert len(cell["decode_tokens_per_s"]) == 2
        shares = [cell["decode"][part]["share"] for part in PARTS]
        assert sum(shares) == pytest.approx(1.0)
        assert min(shares) > 0.0
        assert 0.0 < cell["policy_share"] < 1.0
        memory = cell["memory"]
        assert len(memory["rates"]) == len(memory["ceilings"]) == 2
        assert (
            0.0
            < memory["share"]
            == pytest.approx(statistics.median(map(truediv, memory["rates"], memory["ceilings"])))
        )
    with Image.open(tmp_path / "engine.png") as picture:
        assert min(picture.size) > 500


def test_the_picture_shows_parts_as_areas(tmp_path: Path) -> None:
    run = Run(
        lengths=Lengths(prompt_tokens=1, output_tokens=2),
        steps=[step("prefill", 1, forward=6.0), step("decode", 1, schedule=2.0, forward=4.0)],
        tokens=[[1, 1]],
    )
    cell = Cell(num_seqs=1, runs=[run], split_runs=[run], detokenize_s_per_token=None)
    pages.draw("two parts", [cell], tmp_path / "engine.png")
    with Image.open(tmp_path / "engine.png") as picture:
        colours = picture.convert("RGB").getcolors(maxcolors=1 << 24)
    counts: dict[Any, int] = {colour: count for count, colour in colours or ()}
    assert counts[ImageColor.getrgb(ORANGE)] > 10_000  # forward
    assert counts[ImageColor.getrgb(BLUE)] > 10_000  # schedule


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (("--output-tokens", "1"), "--output-tokens 2"),
        (("--prompt-tokens", "100000"), "exceed the context"),
        (("--num-seqs", "1,100000"), "KV blocks, and there are"),
        (("--num-seqs", "64", "--output-tokens", "3"), "too few: not once did all 64"),
    ],
)
def test_settings_without_sense_are_refused(
    tmp_path: Path, arguments: tuple[str, ...], fault: str
) -> None:
    parser = ArgumentParser()
    engine_bench.add_arguments(parser)
    parsed: Namespace = parser.parse_args([*arguments, "--out", str(tmp_path / "none")])
    with pytest.raises(ConfigError, match=fault):
        engine_bench.run(parsed)
    assert not (tmp_path / "none").exists()
