"""What a call returns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.engine import LLM

from .conftest import GREEDY, HOT, PROMPTS, one


def test_text_is_what_the_tokens_decode_to(llm: LLM) -> None:
    for result in llm.generate(PROMPTS, replace(HOT, ignore_eos=True), use_tqdm=False):
        (output,) = result.outputs
        assert len(output.token_ids) == HOT.max_tokens
        whole = llm.tokenizer.decode([*result.prompt_token_ids, *output.token_ids])
        assert result.prompt + output.text == whole
        assert (output.finish_reason, output.stop_reason) == ("length", None)


def test_text_keeps_the_space_between_prompt_and_output(tiny: Path) -> None:
    """SentencePiece drops the space at the start of a text, but an output is none."""
    with LLM(str(tiny), num_blocks=40) as llm:
        space = llm.tokenizer._backend.token_to_id("▁h")
        # Words, and no bytes that are no characters.
        bias = dict.fromkeys(llm.tokenizer.byte_of_token_id, -100.0) | {space: 10.0}
        params = replace(HOT, ignore_eos=True, logit_bias=bias)
        results = llm.generate(["hello"] * 8, params, use_tqdm=False)
        for result in results:
            ids = [*result.prompt_token_ids, *result.outputs[0].token_ids]
            assert "hello" + result.outputs[0].text == llm.tokenizer.decode(ids)
        assert any(result.outputs[0].text.startswith(" ") for result in results)


def test_several_outputs_of_one_prompt(llm: LLM) -> None:
    (result,) = llm.generate(PROMPTS[1], replace(HOT, n=4), use_tqdm=False)
    assert [output.index for output in result.outputs] == [0, 1, 2, 3]
    assert len({output.text for output in result.outputs}) == 4
    assert result.outputs[0].text == one(llm, PROMPTS[1], HOT).text


def test_best_of_gives_the_likeliest_per_token(llm: LLM) -> None:
    params = replace(HOT, n=5, logprobs=0)
    (everything,) = llm.generate(PROMPTS[1], params, use_tqdm=False)
    (best,) = llm.generate(
        PROMPTS[1], replace(params, n=2, best_of=5, logprobs=None), use_tqdm=False
    )

    def mean(output: Any) -> float:
        return float(output.cumulative_logprob) / len(output.token_ids)

    ranked = sorted(everything.outputs, key=mean, reverse=True)
    assert [output.text for output in best.outputs] == [output.text for output in ranked[:2]]
    assert [output.index for output in best.outputs] == [0, 1]
    assert [mean(output) for output in best.outputs] == pytest.approx(
        [mean(output) for output in ranked[:2]]
    )
    assert all(output.logprobs is None for output in best.outputs)


def test_logprobs_of_output_and_prompt(llm: LLM) -> None:
    params = replace(GREEDY, logprobs=2, prompt_logprobs=1)
    (result,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
    (output,) = result.outputs
    drawn = [entry[token] for entry, token in zip(output.logprobs, output.token_ids, strict=True)]
    assert all(each.rank == 1 for each in drawn)
    assert all([each.rank for each in entry.values()] == [1, 2] for entry in output.logprobs)
    assert output.cumulative_logprob == pytest.approx(sum(each.logprob for each in drawn))
    assert "".join(each.decoded_token for each in drawn).startswith(output.text)
    first, *others = result.prompt_logprobs
    assert first is None
    for entry, token in zip(others, result.prompt_token_ids[1:], strict=True):
        assert next(iter(entry)) == token
        assert {each.rank for each in entry.values()} >= {1}
        assert len(entry) == (1 if entry[token].rank == 1 else 2)
    (plain,) = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    assert plain.prompt_logprobs is None
    assert plain.outputs[0].logprobs is None
    assert plain.outputs[0].cumulative_logprob is None
    for each in (plain.prompt_token_ids, plain.outputs, plain.outputs[0].token_ids):
        assert type(each) is list  # as vLLM's, to be added to another one


def test_an_output_ends_before_a_stop_string(llm: LLM) -> None:
    full = one(llm, PROMPTS[1], replace(GREEDY, max_tokens=60))
    words = full.text.split()
    stop = f"{words[4]} {words[5]}"
    params = replace(GREEDY, max_tokens=60, stop=(stop,), logprobs=0)
    output = one(llm, PROMPTS[1], params)
    assert output.text == full.text[: full.text.index(stop)]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert output.token_ids == full.token_ids[: len(output.token_ids)]
    assert len(output.token_ids) == len(output.logprobs) < len(full.token_ids)
    shown = one(llm, PROMPTS[1], replace(params, include_stop_str_in_output=True))
    assert shown.text == output.text + stop
    lone: Any = stop  # as others take it, too
    assert one(llm, PROMPTS[1], replace(params, stop=lone)) == output


def test_a_stop_string_ends_its_branch_alone(llm: LLM) -> None:
    params = replace(HOT, n=4, max_tokens=40, ignore_eos=True)
    (free,) = llm.generate(PROMPTS[1], params, use_tqdm=False)
    text, *others = (free.outputs[index].text for index in (2, 0, 1, 3))
    pieces = (text[start : start + 12] for start in range(10, len(text) - 12))
    stop = next(piece for piece in pieces if not any(piece in other for other in others))
    (result,) = llm.generate(PROMPTS[1], replace(params, stop=(stop,)), use_tqdm=False)
    assert result.outputs[2].text == free.outputs[2].text[: free.outputs[2].text.index(stop)]
    assert [output.finish_reason for output in result.outputs] == [
        "length", "length", "stop", "length"
    ]  # fmt: skip
    for index in (0, 1, 3):
        assert result.outputs[index] == free.outputs[index]


def test_an_end_token_counts_but_has_no_text(llm: LLM) -> None:
    free = one(llm, PROMPTS[1], GREEDY)
    end = free.token_ids[6]
    output = one(llm, PROMPTS[1], replace(GREEDY, stop_token_ids=(end,)))
    num_tokens = free.token_ids.index(end) + 1
    assert output.token_ids == free.token_ids[:num_tokens]
    assert (output.finish_reason, output.stop_reason) == ("stop", end)
    assert free.text.startswith(output.text)
    ids = [*llm.tokenizer.encode(PROMPTS[1]), *output.token_ids[:-1]]
    assert PROMPTS[1] + output.text == llm.tokenizer.decode(ids)
