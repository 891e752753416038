"""What is refused, interrupted or broken, and what a call leaves behind."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
from msgspec.structs import replace

from penstock.engine import (
    LLM,
    BeamSearch,
    ConfigError,
    EngineDeadError,
    EngineError,
    InvalidRequestError,
    PromptTooLongError,
    SamplingParams,
)

from .conftest import GREEDY, MAX_MODEL_LEN, PROMPTS, one


@pytest.mark.parametrize(
    ("prompts", "error", "words"),
    [
        (["fine", list(range(100, 100 + MAX_MODEL_LEN))], PromptTooLongError, "prompt 1"),
        (["fine", []], InvalidRequestError, "prompt 1: the prompt has no tokens"),
        ([[5, 1 << 20]], InvalidRequestError, "1048576 is not in the vocabulary"),
        ([[5, -1]], InvalidRequestError, "-1 is not in the vocabulary"),
        (["fine", 7.5], InvalidRequestError, "not float"),
        ([{"promt": "fine"}], InvalidRequestError, "a prompt must be"),
        (None, InvalidRequestError, "not NoneType"),
        (b"x", InvalidRequestError, "a prompt must be a text or a list of token ids, not bytes"),
        ([b"x"], InvalidRequestError, "a prompt must be a text or a list of token ids, not bytes"),
        (bytearray(b"x"), InvalidRequestError, "not bytearray"),
        ([memoryview(b"x")], InvalidRequestError, "not memoryview"),
        ({"prompt": b"x"}, InvalidRequestError, "not bytes"),
        ({"prompt_token_ids": b"x"}, InvalidRequestError, "not bytes"),
        ("a\ud800b", InvalidRequestError, r"U\+D800 at position 1 is half a pair"),
        (["fine", "\udfff"], InvalidRequestError, r"U\+DFFF at position 0 is half a pair"),
    ],
)
def test_a_bad_prompt_refuses_the_call_before_anything_runs(
    prompts: Any, error: type[InvalidRequestError], words: str, llm: LLM
) -> None:
    num_steps = llm._core.scheduler.counters.num_steps
    with pytest.raises(error, match=words):
        llm.generate(prompts, GREEDY, use_tqdm=False)
    assert not llm._core.scheduler.num_waiting
    assert llm._core.scheduler.counters.num_steps == num_steps


@pytest.mark.parametrize(
    ("changes", "param"),
    [({"logit_bias": {1 << 20: 1.0}}, "logit_bias"), ({"stop_token_ids": (-3,)}, "stop_token_ids")],
)
def test_unknown_ids_in_parameters_are_refused(
    changes: dict[str, Any], param: str, llm: LLM
) -> None:
    with pytest.raises(InvalidRequestError, match="vocabulary") as caught:
        llm.generate("fine", replace(GREEDY, **changes), use_tqdm=False)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"logprobs": True}, "logprobs must be int or None, not True"),
        ({"prompt_logprobs": 1.5}, "prompt_logprobs must be int or None"),
        ({"n": 1.5}, "n must be int"),
        ({"stop": (1,)}, "stop must be a list of str"),
        ({"stop_token_ids": ("a",)}, "stop_token_ids must be a list of int"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias must be a mapping from int to float"),
        ({"ignore_eos": "no"}, "ignore_eos must be bool"),
    ],
)
def test_a_parameter_of_a_wrong_type_is_named_before_anything_runs(
    changes: dict[str, Any], words: str, llm: LLM
) -> None:
    params = replace(GREEDY, **changes)
    for several in (params, [params]):
        with pytest.raises(InvalidRequestError, match=words) as caught:
            llm.generate(["fine"], several, use_tqdm=False)
        assert caught.value.param in changes
    assert llm.generate("fine", GREEDY, use_tqdm=False)


def test_numbers_may_be_numpys_and_tuples_lists(llm: LLM) -> None:
    params: Any = {"temperature": np.float32(0), "max_tokens": np.int64(3), "stop_token_ids": [5]}
    (result,) = llm.generate("fine", SamplingParams(**params), use_tqdm=False)
    assert 0 < len(result.outputs[0].token_ids) <= 3


def test_what_is_no_sampling_params_or_no_conversation_is_refused(llm: LLM) -> None:
    wrong: Any = [{"temperature": 0}]
    with pytest.raises(InvalidRequestError, match="must be SamplingParams, not dict"):
        llm.generate("fine", wrong, use_tqdm=False)
    for messages in ("hello", [["hello"]]):
        with pytest.raises(InvalidRequestError, match="a list of messages"):
            llm.chat(messages, GREEDY, use_tqdm=False)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"ignore_eos": True},
        {"logit_bias": {5: 100.0}},
        {"temperature": 1.0, "top_k": 1},
        {"n": 2, "beam_search": BeamSearch(width=2)},
        {"n": 2, "temperature": 1.0},
    ],
)
def test_min_tokens_must_leave_a_token(changes: dict[str, Any], llm: LLM) -> None:
    size = llm.info.vocab_size
    rest = tuple(i for i in range(size) if i not in llm.info.eos_token_ids)
    params = replace(GREEDY, min_tokens=2, stop_token_ids=rest, **changes)
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate("fine", params, use_tqdm=False)
    assert caught.value.param == "stop_token_ids"
    assert str(caught.value) == (
        f"stop_token_ids and the end tokens are the whole vocabulary of {size} tokens, so that "
        "none is left for min_tokens"
    )
    for fine in (
        replace(params, min_tokens=0),
        replace(params, stop_token_ids=rest[1:]),  # one token is left
    ):
        (result,) = llm.generate("fine", fine, use_tqdm=False)
        assert result.outputs[0].token_ids


def test_a_surrogate_in_a_conversation_is_named(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match=r"U\+D800") as caught:
        llm.chat([{"role": "user", "content": "\ud800"}], GREEDY, use_tqdm=False)
    assert caught.value.param == "messages"


def test_lists_must_be_as_long_as_the_prompts(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="2 sampling parameters for 3 prompts"):
        llm.generate(PROMPTS, [GREEDY, GREEDY], use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="1 priorities for 3 prompts"):
        llm.generate(PROMPTS, GREEDY, priority=[1], use_tqdm=False)


def test_priority_is_refused_where_it_would_not_count(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="scheduling_policy"):
        llm.generate(PROMPTS, GREEDY, priority=1, use_tqdm=False)


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
