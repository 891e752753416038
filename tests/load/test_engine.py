"""`penstock bench engine`: tokens counted, time put where it was spent, settings compared."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from penstock.engine.engine_core import EngineCore
from penstock.engine.protocol.messages import EngineInfo
from penstock.engine.startup import build_core
from penstock.load.engine import Setting, Side, limit_rows, speeds
from penstock.load.engine_runs import Phase, Run, Step, make_request, run_requests
from penstock.load.limits import Ceilings, ReadWeights

from .conftest import Penstock


@pytest.fixture(scope="module")
def core() -> Iterator[EngineCore]:
    """The demo model; three prompts of 24 tokens do not fit into one step."""
    core, _ = build_core(
        EngineConfig(
            cache=CacheConfig(num_blocks=256),
            scheduler=SchedulerConfig(max_num_batched_tokens=60),
        )
    )
    yield core
    core.close()


def run_once(core: EngineCore, count: int, *, seed: int) -> Run:
    rng = random.Random(seed)
    prompts = [rng.choices(range(1000), k=24) for _ in range(count)]
    return run_requests(core, [make_request(*each, 12) for each in enumerate(prompts)])


def test_every_token_is_counted_once_in_its_phase(core: EngineCore) -> None:
    alone, together = run_once(core, 1, seed=0), run_once(core, 4, seed=1)
    assert [len(tokens) for tokens in together.tokens] == [12] * 4
    assert sum(step.num_tokens for step in together.steps) == 12 * 4
    assert [step.num_tokens for step in alone.phase("prefill")] == [1]
    assert [step.num_tokens for step in alone.phase("decode")] == [1] * 11
    # 60 tokens: two prompts and half of the third, which then has to wait for its rest.
    assert [step.num_tokens for step in together.phase("prefill")] == [2, 4]
    assert {step.num_tokens for step in together.phase("decode")} == {4}
    assert sum(step.num_tokens for step in together.phase("tail")) == 2


# -- what follows from steps ------------------------------------------------------------------


def side_of(*runs: Run, name: str = "", **fields: Any) -> Side:
    info = cast("EngineInfo", SimpleNamespace(weight_bytes=8))
    core = cast("EngineCore", None)
    made = Side(name=name, core=core, info=info, in_bytes=True, **fields)
    made.runs[2] = list(runs)
    return made


def made_run(factor: float, *tokens: int) -> Run:
    steps: list[tuple[Phase, float, int]] = [
        ("prefill", 0.05, 2),
        ("decode", 0.01, 2),
        ("decode", 0.01, 2),
        ("tail", 0.03, 2),
    ]
    return Run(
        num_prompt_tokens=200,
        steps=[Step(name, at_s * factor, n, cpu_s=at_s * factor) for name, at_s, n in steps],
        tokens=[list(tokens) * 4, [1] * 4],
    )


def test_figures_of_known_steps() -> None:
    slow, fast = made_run(2.0, 1), made_run(1.0, 2)
    assert fast.output_tokens_per_s == pytest.approx(8 / 0.1)
    assert fast.prefill_tokens_per_s == pytest.approx(200 / 0.05)
    assert fast.decode_tokens_per_s == pytest.approx(4 / 0.02)
    first, other = speeds([side_of(slow, fast), side_of(fast, fast)], 2)
    assert (first["times"], first["same"]) == (1.0, 1.0)
    assert other["times"] == pytest.approx(1.5)  # of 2 and 1, neighbours
    assert other["by_cpu"] == pytest.approx((1.5, 1.0, 2.0))
    assert other["same"] == 0.75  # in the first run one of two
    assert other["tokens_per_step"] == 1.0


def test_limits_are_those_of_all_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """10 numbers in layers meet every token, 4 in the head the tokens after which one is drawn."""
    read = ReadWeights(num_in_layers=10, num_in_head=4, num_bytes=28)
    monkeypatch.setattr(ReadWeights, "of", lambda info: read)
    steps = [
        Step(phase="prefill", step_s=5.0, num_tokens=2),
        Step(phase="decode", step_s=2.0, num_tokens=2),
    ]
    run = Run(num_prompt_tokens=10, steps=steps, tokens=[[1, 1]] * 2)
    ceilings = Ceilings(read_bytes_per_s=28.0, products_per_s=36.0)
    decode, prefill = limit_rows([side_of(run, ceilings=ceilings)], 2)
    names = ("bound_tokens_per_s", "tokens_per_s", "share")
    assert [decode[name] for name in names] == [2.0, 1.0, 0.5]
    assert [prefill[name] for name in names] == pytest.approx([10 / 3, 2.0, 0.6])
    assert limit_rows([side_of(run)], 2) == []


# -- the command ----------------------------------------------------------------------------------


def test_settings_are_options_of_serve() -> None:
    assert Setting.parse("").config("demo") == EngineConfig(model=ModelConfig(model="demo"))
    text = "int4,kv-cache-dtype=fp8,no-quantize-activations"
    text += ",quantization-override=lm_head=int8,quantization-override=*v_proj=int8,gguf=a.gguf"
    config = Setting.parse(text).config("demo", num_threads=1)
    assert (config.model.model, config.model.quantization) == ("a.gguf", "int4")
    assert not config.model.quantize_activations
    assert list(config.model.quantization_override) == ["lm_head=int8", "*v_proj=int8"]
    assert (config.cache.kv_cache_dtype, config.device.num_threads) == ("fp8", 1)
    long = "--quantization int4 --kv-cache-dtype fp8 --no-quantize-activations"
    assert Setting.parse(long).config("demo") == Setting.parse(
        "int4,kv-cache-dtype=fp8,no-quantize-activations"
    ).config("demo")


@pytest.mark.exhaustive
def test_two_settings_take_turns_with_the_same_requests(penstock: Penstock, tmp_path: Path) -> None:
    arguments = ("--num-seqs", "1,3", "--input-len", "16", "--output-len", "8", "--repeats", "2",
                 "--temperature", "1", "--limits", "--out", str(tmp_path))  # fmt: skip
    speculating = "--speculative-config.method ngram"
    done = penstock("bench", "engine", *arguments, "--compare", "", speculating, "int8")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["engine.json", "engine.md"]
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert len(rows) == (2 + 6) + (2 + 12)
    assert set(rows) <= set((tmp_path / "engine.md").read_text().splitlines())
    figures = json.loads((tmp_path / "engine.json").read_text())
    found = [(row["num_seqs"], row["setting"]) for row in figures["speeds"]]
    assert found == [(n, name) for n in (1, 3) for name in ("as it is", speculating, "int8")]
    for own, drafting, _ in (figures["speeds"][:3], figures["speeds"][3:]):
        assert own["same"] == drafting["same"] == 1.0  # drafts change no token
        assert drafting["tokens_per_step"] >= own["tokens_per_step"] == 1.0
    assert min(row["times"] for row in figures["speeds"]) > 0
    assert min(row["share"] for row in figures["limits"]) > 0


def test_texts_of_ones_own_are_measured(penstock: Penstock, tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    lines = [{"prompt": "What is penstock?"}, {"prompt": [5, 6, 7], "max_tokens": 4}]
    path.write_text("\n".join(map(json.dumps, lines)))
    done = penstock(
        "bench", "engine", "--num-seqs", "2", "--repeats", "1", "--dataset", "jsonl",
        "--dataset-path", str(path), "--output-len", "6", "--out", str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert ": jsonl, " in done.stdout


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (("--input-len", "100000"), "exceed the context"),
        (("--num-seqs", "1,100000"), "KV blocks, and there are"),
        (("--compare", "--quantization int5"), "--quantization must be one of"),
        (("--compare", "kv-cache-type=int8"), "unknown option --kv-cache-type (did you mean"),
    ],
)
def test_settings_without_sense_are_refused(
    penstock: Penstock, tmp_path: Path, arguments: tuple[str, ...], fault: str
) -> None:
    done = penstock("bench", "engine", *arguments, "--out", str(tmp_path / "none"))
    assert done.returncode == 2
    assert fault in done.stderr
    assert not (tmp_path / "none").exists()
