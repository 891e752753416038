"""Completions: every kind of prompt, several choices, parallel-list logprobs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.engine.request import TokenLogprobs
from penstock.engine.text import Tokenizer
from penstock.gateway.api.shared.logprobs import TokenLists

from ..conftest import ANSWER, Serve, Served


async def test_text_prompt(served: Served) -> None:
    completion = await served.client.completions.create(model="tiny", prompt="Once", max_tokens=500)
    assert completion.choices[0].text == ANSWER
    assert completion.choices[0].finish_reason == "stop"
    assert served.prompt_of() == "Once"


@pytest.mark.parametrize("prompt", [["one", "two"], [[5, 6], [7]], [8, 9]])
async def test_lists_of_prompts(served: Served, prompt: Any) -> None:
    completion = await served.client.completions.create(model="tiny", prompt=prompt)
    num = 1 if isinstance(prompt[0], int) else len(prompt)
    assert [choice.index for choice in completion.choices] == list(range(num))
    assert {choice.text for choice in completion.choices} == {ANSWER}
    ids = [list(request.prompt_token_ids) for request in served.engine.submitted.values()]
    if isinstance(prompt[0], str):
        ids = [served.tokenizer.decode(prompt_ids) for prompt_ids in ids]
    assert ids == ([prompt] if num == 1 else prompt)
    assert completion.usage is not None
    assert completion.usage.completion_tokens == num * (len(served.engine.script) + 1)


async def test_stream_of_several_choices(serve: Serve) -> None:
    async with serve(step_s=0.001) as served:
        stream = await served.client.completions.create(
            model="tiny", prompt=["one", "two"], stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    texts = {0: "", 1: ""}
    for chunk in chunks[:-1]:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {0: ANSWER, 1: ANSWER}
    ends = [chunk.choices[0] for chunk in chunks[:-1] if chunk.choices[0].finish_reason]
    assert sorted((end.index, end.finish_reason) for end in ends) == [(0, "stop"), (1, "stop")]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 2 * (len(served.engine.script) + 1)


async def test_logprobs_lists(served: Served) -> None:
    completion = await served.client.completions.create(model="tiny", prompt="x", logprobs=1)
    lists = completion.choices[0].logprobs
    assert lists is not None
    assert lists.tokens is not None
    assert lists.text_offset is not None
    assert len(lists.tokens) == len(served.engine.script)
    assert lists.token_logprobs == [-0.5] * len(lists.tokens)
    assert lists.text_offset[:2] == [0, len(lists.tokens[0])]


def test_of_equal_texts_the_likelier_is_told(tokenizer: Tokenizer) -> None:
    """Bytes that are no characters by themselves all have the same text."""
    same = [t for t in range(1, 300) if tokenizer.token_text(t) == "\ufffd"][:3]
    top = ((same[0], -0.21), (5, -1.0), (same[1], -11.41))
    for said in (same[0], same[2]):
        entry = TokenLogprobs(token_id=said, logprob=-12.0, rank=400, top=top)
        lists = TokenLists(tokenizer, num_top=3, skip_special_tokens=True).add([entry])
        assert lists["top_logprobs"] == [{"\ufffd": -0.21, tokenizer.token_text(5): -1.0}]
        assert lists["token_logprobs"] == [-12.0]


async def test_client_gone_aborts_every_choice(serve: Serve) -> None:
    async with serve(step_s=0.01) as served:
        body: dict[str, Any] = {"prompt": ["a", "b", "c"], "stream": True}
        body |= {"ignore_eos": True, "max_tokens": 1000}  # none ends before its client leaves
        call = asyncio.create_task(served.http.post("/v1/completions", json=body))
        await served.submitted(3)
        call.cancel()
        await served.aborted(3)


async def test_without_max_tokens_a_completion_has_16(served: Served) -> None:
    completion = await served.client.completions.create(model="tiny", prompt="Once")
    assert completion.usage is not None
    assert completion.usage.completion_tokens <= 16
    (request,) = served.engine.submitted.values()
    assert request.sampling_params.max_tokens == 16
