"""Texts continued offline: every prompt's outputs, whole and in order."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from penstock.engine import LLM
from penstock.engine.request import RepetitionDetection

from .conftest import GREEDY, HOT, PROMPTS, one


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    results = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [result.prompt for result in results] == PROMPTS
    assert len({result.request_id for result in results}) == 3
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert list(result.prompt_token_ids) == llm.tokenizer.encode(prompt)
        assert result.finished
        assert one(llm, prompt, GREEDY).token_ids == result.outputs[0].token_ids


def test_a_prompt_is_a_text_or_ids_and_a_list_holds_several(llm: LLM) -> None:
    ids = llm.tokenizer.encode(PROMPTS[0])
    expected = one(llm, PROMPTS[0], GREEDY)
    for prompt in (ids, [ids], {"prompt_token_ids": ids}, [{"prompt": PROMPTS[0]}]):
        assert one(llm, prompt, GREEDY) == expected
    mixed = llm.generate([PROMPTS[0], ids], GREEDY, use_tqdm=False)
    assert [result.prompt for result in mixed] == [PROMPTS[0], None]
    assert llm.generate([], GREEDY) == []


def test_a_small_top_n_sigma_makes_a_hot_draw_greedy(llm: LLM) -> None:
    hot = replace(GREEDY, temperature=50.0, seed=1)
    cut = replace(hot, top_n_sigma=1e-6)
    greedy, plain, narrow = llm.generate(PROMPTS[:1] * 3, [GREEDY, hot, cut], use_tqdm=False)
    assert narrow.outputs[0].token_ids == greedy.outputs[0].token_ids
    assert plain.outputs[0] == one(llm, PROMPTS[0], hot) != narrow.outputs[0]
    assert one(llm, PROMPTS[0], replace(hot, top_n_sigma=100.0)) == plain.outputs[0]


def test_without_parameters_the_model_makers_advice_holds(llm: LLM) -> None:
    params = llm.default_sampling_params
    assert (params.temperature, params.top_p, params.max_tokens) == (0.2, 0.9, 16)
    (result,) = llm.generate(PROMPTS[0], use_tqdm=False)
    assert result.outputs == llm.generate(PROMPTS[0], params, use_tqdm=False)[0].outputs


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    params = [GREEDY, replace(GREEDY, max_tokens=3, ignore_eos=True), replace(HOT, n=2)]
    results = llm.generate(PROMPTS, params, use_tqdm=False)
    assert results[0].outputs[0] == one(llm, PROMPTS[0], GREEDY)
    assert len(results[1].outputs[0].token_ids) == 3
    assert len(results[2].outputs) == 2


def test_equal_prompts_differ_and_a_call_repeats(llm: LLM) -> None:
    def texts(params: Any) -> list[str]:
        results = llm.generate([PROMPTS[1]] * 3, params, use_tqdm=False)
        return [result.outputs[0].text for result in results]

    assert len(set(texts(HOT))) == 3
    assert texts(HOT) == texts(HOT)
    assert texts(replace(HOT, seed=1)) == texts([replace(HOT, seed=seed) for seed in (1, 2, 3)])
    assert len(set(texts([HOT] * 3))) == 1


def test_a_loop_ends_an_output(llm: LLM) -> None:
    """A model that may say one word only says it again and again."""
    (word,) = llm.tokenizer.encode("a")[-1:]
    looped = replace(
        GREEDY,
        allowed_token_ids=(word,),
        max_tokens=200,
        repetition_detection=RepetitionDetection(max_pattern_size=8, min_count=5),
    )
    output = one(llm, PROMPTS[0], looped)
    assert list(output.token_ids) == [word] * 5
    assert (output.finish_reason, output.stop_reason) == ("stop", "repetition")
    plain = one(llm, PROMPTS[1], GREEDY)
    asked = replace(GREEDY, repetition_detection=looped.repetition_detection)
    assert one(llm, PROMPTS[1], asked) == plain
