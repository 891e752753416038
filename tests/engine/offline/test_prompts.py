"""Prompts, parameters and settings of calls: what is refused before anything runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from penstock.engine import (
    LLM,
    BeamSearch,
    InvalidRequestError,
    PromptTooLongError,
    SamplingParams,
)

from .conftest import GREEDY, MAX_MODEL_LEN, PROMPTS


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
