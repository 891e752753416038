"""Conversations, beam search and the prefix cache offline."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from penstock.engine import LLM, BeamSearch, InvalidRequestError, Retention, SamplingParams

from .conftest import GREEDY, MAX_MODEL_LEN, PROMPTS, one


def question(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_chat_answers_conversations(llm: LLM) -> None:
    results = llm.chat([question(text) for text in PROMPTS], GREEDY, use_tqdm=False)
    assert len(results) == 3
    (alone,) = llm.chat(question(PROMPTS[0]), GREEDY, use_tqdm=False)
    assert alone.outputs == results[0].outputs
    assert PROMPTS[0] in alone.prompt
    ids = llm.tokenizer.encode(alone.prompt, add_special_tokens=False)
    assert list(alone.prompt_token_ids) == ids
    assert alone.outputs[0].token_ids == one(llm, ids, GREEDY).token_ids


def test_chat_ends_by_itself(llm: LLM) -> None:
    (result,) = llm.chat(question("Hello!"), replace(GREEDY, max_tokens=200), use_tqdm=False)
    (output,) = result.outputs
    assert output.finish_reason == "stop"
    assert output.stop_reason == output.token_ids[-1] in llm.info.eos_token_ids
    assert output.text == llm.tokenizer.decode(output.token_ids)
    assert output.text.strip()


def test_a_stop_string_may_be_a_special_token(llm: LLM) -> None:
    (end,) = llm.tokenizer.encode("<|end|>", add_special_tokens=False)
    for shows in (False, True):
        params = replace(
            GREEDY,
            max_tokens=200,
            ignore_eos=True,
            stop=("<|end|>",),
            include_stop_str_in_output=shows,
        )
        (result,) = llm.chat(question("Hello!"), params, use_tqdm=False)
        (output,) = result.outputs
        assert (output.finish_reason, output.token_ids[-1]) == ("stop", end)
        assert output.token_ids.count(end) == 1
        assert output.text.endswith("<|end|>") == shows


def test_chat_with_a_template_of_its_own(llm: LLM) -> None:
    (result,) = llm.chat(
        question("hi"),
        GREEDY,
        chat_template="{{ tone }}: {{ messages[0].content }}"
        "{% if add_generation_prompt %} ->{% endif %}",
        chat_template_kwargs={"tone": "loud"},
        add_generation_prompt=False,
        use_tqdm=False,
    )
    assert result.prompt == "loud: hi"


def test_beam_search_gives_hypotheses_best_first(llm: LLM) -> None:
    search = BeamSearch(width=4, length_penalty=0.5)
    results = llm.beam_search(PROMPTS, search, max_tokens=12, use_tqdm=False)
    for prompt, result in zip(PROMPTS, results, strict=True):
        scores = [output.score for output in result.outputs]
        assert len(scores) == 4
        assert scores == sorted(scores, reverse=True)
        assert len({tuple(output.token_ids) for output in result.outputs}) == 4
        best = result.outputs[0]
        params = SamplingParams(beam_search=search, max_tokens=12, logprobs=0)
        detailed = one(llm, prompt, params)
        assert detailed.token_ids == best.token_ids
        assert best.score == pytest.approx(detailed.cumulative_logprob / len(best.token_ids) ** 0.5)


def test_beam_search_of_width_one_is_greedy(llm: LLM) -> None:
    (result,) = llm.beam_search(PROMPTS[0], BeamSearch(width=1), max_tokens=24, use_tqdm=False)
    assert result.outputs[0].token_ids == one(llm, PROMPTS[0], GREEDY).token_ids


def test_beam_search_may_return_fewer_and_go_past_the_end(llm: LLM) -> None:
    prompt = llm.chat(question("Hello!"), GREEDY, use_tqdm=False)[0].prompt_token_ids
    search = BeamSearch(width=3)
    (ended,) = llm.beam_search(list(prompt), search, max_tokens=80, n=2, use_tqdm=False)
    assert [output.finish_reason for output in ended.outputs] == ["stop", "stop"]
    (ongoing,) = llm.beam_search(
        list(prompt), search, max_tokens=80, ignore_eos=True, use_tqdm=False
    )
    assert [len(output.token_ids) for output in ongoing.outputs] == [80] * 3


def test_a_warmed_prompt_is_found_until_it_is_dropped(llm: LLM) -> None:
    prompt = "The lighthouse keeper wrote down every ship he saw. " * 6
    num_tokens = len(llm.tokenizer.encode(prompt))

    def num_cached() -> int:
        params = replace(GREEDY, max_tokens=1)  # no KV beyond the prompt's
        return llm.generate(prompt, params, use_tqdm=False)[0].num_cached_tokens

    llm.warm(prompt, retention=Retention(duration_s=60.0))
    assert num_cached() == num_tokens - 1  # the last is computed, for what follows it
    assert llm.drop_prefix(prompt) >= num_tokens // 16  # blocks of 16 tokens
    assert num_cached() == 0
    assert num_cached() == num_tokens - 1


def test_a_chat_without_a_limit_may_fill_the_context(llm: LLM) -> None:
    """As over HTTP. `generate` keeps the 16 tokens of completions."""
    for params in (None, SamplingParams(ignore_eos=True), SamplingParams(n=2, ignore_eos=True)):
        (result,) = llm.chat(question("Hello!"), params, use_tqdm=False)
        room = MAX_MODEL_LEN - len(result.prompt_token_ids)
        for output in result.outputs:
            if params is None:
                assert output.finish_reason == "stop"  # when the answer is over
            else:
                assert len(output.token_ids) == room
    (result,) = llm.chat(question("Hello!"), SamplingParams(max_tokens=16, ignore_eos=True))
    assert len(result.outputs[0].token_ids) == 16
    params = SamplingParams(min_tokens=40)
    (result,) = llm.chat(question("Hello!"), params, use_tqdm=False)
    assert len(result.outputs[0].token_ids) >= 40
    with pytest.raises(InvalidRequestError, match="min_tokens"):
        llm.generate("Hello!", params, use_tqdm=False)
    (result,) = llm.generate("Hello!", SamplingParams(ignore_eos=True), use_tqdm=False)
    assert len(result.outputs[0].token_ids) == 16


def test_several_chats_share_what_the_cache_holds(llm: LLM) -> None:
    """Ten times the context does not fit: each output gets less."""
    params = SamplingParams(n=10, ignore_eos=True)
    (result,) = llm.chat(question("Hello!"), params, use_tqdm=False)
    lengths = {len(output.token_ids) for output in result.outputs}
    assert len(lengths) == 1
    assert 16 < lengths.pop() < MAX_MODEL_LEN // 2
