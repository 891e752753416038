"""What is refused, interrupted or broken, and what a call leaves behind."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from msgspec.structs import replace

from penstock.engine import (
    LLM,
    ConfigError,
    EngineDeadError,
    EngineError,
)

from .conftest import GREEDY, PROMPTS, one


def test_lower_priorities_run_first(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(str(tiny), num_blocks=40, max_num_seqs=1, scheduling_policy="priority") as llm:
        order: list[str] = []
        step = llm._core.step

        def watched() -> Any:
            outputs = step()
            order.extend(output.request_id for output in outputs if output.is_last)
            return outputs

        monkeypatch.setattr(llm._core, "step", watched)
        results = llm.generate(["a", "b", "c"], GREEDY, priority=[2, 0, 1], use_tqdm=False)
        ids = [result.request_id for result in results]
        assert order == [ids[1], ids[2], ids[0]]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_models_len": 5}, "'max_models_len'; did you mean 'max_model_len'"),
        ({"tensor_parallelism": 2}, "'tensor_parallelism'"),
        ({"preemption": "never"}, "preemption must be one of auto, swap, recompute, not 'never'"),
        ({"block_size": 0}, "--block-size must be an even number from 2 to 65536"),
        ({"block_size": 17}, "--block-size must be an even number from 2 to 65536"),
        ({"block_size": -16}, "--block-size must be an even number from 2 to 65536"),
        ({"block_size": 16.0}, "block_size must be int, not 16.0"),
        ({"max_model_len": "64"}, "max_model_len must be int or None"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching must be bool"),
    ],
)
def test_settings_that_cannot_work_are_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM(**settings)


def press_ctrl_c_in_step(llm: LLM, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    submit = llm._core._executor.submit
    count = 0

    def interrupted(batch: Any) -> Any:
        nonlocal count
        count += 1
        if count == number:
            signal.raise_signal(signal.SIGINT)
        return submit(batch)

    monkeypatch.setattr(llm._core._executor, "submit", interrupted)


def test_after_ctrl_c_the_next_call_starts_clean(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [*PROMPTS, "A prompt that the interrupted call computes for the first time."]
    num_steps = llm._core.scheduler.counters.num_steps
    press_ctrl_c_in_step(llm, 3, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts, replace(GREEDY, n=2), use_tqdm=False)
    assert llm._core.scheduler.counters.num_steps == num_steps + 3
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    monkeypatch.undo()
    assert llm._core.scheduler.blocks.tiers.device.num_held == 0
    results = llm.generate(prompts, GREEDY, use_tqdm=False)
    for prompt, result in zip(prompts, results, strict=True):
        llm.drop_prefix(prompt)
        assert one(llm, prompt, GREEDY) == result.outputs[0]


def test_ctrl_c_in_the_last_step_is_not_lost(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    press_ctrl_c_in_step(llm, 1, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("short", replace(GREEDY, max_tokens=1), use_tqdm=False)


def test_a_model_without_a_distribution_is_an_error_not_an_answer(tiny: Path) -> None:
    weights = safetensors.torch.load_file(tiny / "model.safetensors")
    weights["model.norm.weight"].fill_(float("nan"))
    safetensors.torch.save_file(weights, tiny / "model.safetensors", metadata={"format": "pt"})
    with LLM(tiny, num_blocks=40) as llm:
        with pytest.raises(EngineError, match="not a distribution"):
            llm.generate(["a", "b"], GREEDY, use_tqdm=False)
        assert llm._core.scheduler.blocks.tiers.device.num_held == 0


def test_after_an_error_in_the_engine_there_is_no_next_call(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(str(tiny), num_blocks=40)

    def out_of_memory(batch: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(llm._core._executor, "submit", out_of_memory)
    with pytest.raises(RuntimeError, match="out of memory"):
        llm.generate("a", GREEDY, use_tqdm=False)
    monkeypatch.undo()
    with pytest.raises(EngineDeadError, match="RuntimeError: out of memory"):
        llm.generate("a", GREEDY, use_tqdm=False)
    llm.close()


def test_a_closed_llm_says_so(tiny: Path) -> None:
    with LLM(str(tiny), num_blocks=40) as llm:
        pass
    llm.close()  # once more is no error
    with pytest.raises(EngineDeadError, match="closed"):
        llm.generate("a", GREEDY, use_tqdm=False)


def test_the_progress_bar_counts_prompts_and_tokens(
    llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    llm.generate(PROMPTS, GREEDY)
    shown = capsys.readouterr().err
    assert "3/3" in shown
    assert "tokens/s" in shown
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""
