"""The prompt in the answer: `echo`, its log-probabilities, and scoring without output."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ..conftest import ANSWER, Served

URL = "/v1/completions"
PROMPT = "Hello, wörld! 😀 Once"


async def create(served: Served, **body: Any) -> dict[str, Any]:
    response = await served.http.post(URL, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def at_offsets(choice: dict[str, Any]) -> None:
    """Each token's text lies in the choice's text where its offset says."""
    lists, text = choice["logprobs"], choice["text"]
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    assert len({len(lists[name]) for name in names}) == 1
    assert lists["text_offset"] == sorted(lists["text_offset"])
    for token, offset in zip(lists["tokens"], lists["text_offset"], strict=True):
        if "\ufffd" not in token:  # of a character in several tokens
            assert text[offset : offset + len(token)] == token


async def test_echo(served: Served) -> None:
    answer = await create(served, prompt=PROMPT, echo=True, max_tokens=100)
    [choice] = answer["choices"]
    assert choice["text"] == PROMPT + ANSWER
    assert choice["logprobs"] is None
    assert "prompt_logprobs" not in choice
    [request] = served.engine.submitted.values()
    assert request.sampling_params.prompt_logprobs is None


async def test_echo_with_logprobs(served: Served) -> None:
    answer = await create(served, prompt=PROMPT, echo=True, logprobs=2, max_tokens=100)
    [choice] = answer["choices"]
    prompt_ids = served.tokenizer.encode(PROMPT)
    lists = choice["logprobs"]
    assert choice["text"] == PROMPT + ANSWER
    assert len(lists["tokens"]) == len(prompt_ids) + len(served.engine.script)
    assert lists["tokens"][: len(prompt_ids)] == [
        served.tokenizer.token_text(token_id) for token_id in prompt_ids
    ]
    assert lists["token_logprobs"][:3] == [None, -1.0, -2.0]
    assert lists["token_logprobs"][len(prompt_ids)] == -0.5
    assert lists["top_logprobs"][0] is None
    assert lists["top_logprobs"][1] == {
        served.tokenizer.token_text(7): -0.25,
        served.tokenizer.token_text(prompt_ids[1]): -1.0,
    }
    at_offsets(choice)
    # The first output token begins where the prompt ends.
    assert lists["text_offset"][len(prompt_ids)] == len(PROMPT)


@pytest.mark.parametrize("as_ids", [False, True])
async def test_scoring_without_output(served: Served, as_ids: bool) -> None:
    """As evaluation harnesses do it: several prompts, echo, logprobs, no tokens."""
    texts = [PROMPT, "Hello"]
    ids = [served.tokenizer.encode(text) for text in texts]
    prompts = ids if as_ids else texts
    answer = await create(served, prompt=prompts, echo=True, logprobs=1, max_tokens=0)
    for choice, text, token_ids in zip(answer["choices"], texts, ids, strict=True):
        assert choice["text"] == text
        assert choice["finish_reason"] == "length"
        lists = choice["logprobs"]
        assert lists["token_logprobs"] == [None, *(-float(n) for n in range(1, len(token_ids)))]
        at_offsets(choice)
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
    for request in served.engine.submitted.values():
        assert request.sampling_params.max_tokens == 0


async def test_scoring_one_token_by_the_stock_client(served: Served) -> None:
    completion = await served.client.completions.create(
        model="tiny", prompt=[5], echo=True, logprobs=0, max_tokens=0
    )
    [choice] = completion.choices
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs == [None]
    assert choice.text == served.tokenizer.decode([5])


async def test_a_prompt_that_fills_the_context_can_be_scored(served: Served) -> None:
    answer = await create(served, prompt=[9] * 1024, echo=True, logprobs=0, max_tokens=0)
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == 1024


@pytest.mark.parametrize("max_tokens", [0, 100])
async def test_a_stream_with_echo(served: Served, max_tokens: int) -> None:
    body = {
        "prompt": [PROMPT, "Hello"], "n": 2 if max_tokens else 1, "echo": True, "logprobs": 1,
        "max_tokens": max_tokens,
    }  # fmt: skip
    whole = await create(served, **body)
    streamed = (await served.http.post(URL, json={**body, "stream": True})).text
    choices = [
        {"index": choice["index"], "text": "", "logprobs": {}} for choice in whole["choices"]
    ]
    for block in streamed.split("\n\n")[:-2]:
        [piece] = json.loads(block[6:])["choices"]
        choice = choices[piece["index"]]
        choice["text"] += piece["text"]
        choice["finish_reason"] = piece["finish_reason"]
        for name, values in (piece["logprobs"] or {}).items():
            choice["logprobs"][name] = [*choice["logprobs"].get(name, []), *values]
    assert choices == whole["choices"]


async def test_prompt_logprobs_of_completions(served: Served) -> None:
    answer = await create(
        served, prompt=["Hello", PROMPT], n=2, prompt_logprobs=1, max_tokens=1, logprobs=0
    )
    assert len(answer["choices"]) == 4
    for choice in answer["choices"]:
        text = ("Hello", PROMPT)[choice["index"] // 2]
        first, *rest = choice["prompt_logprobs"]
        assert first is None
        for position, token_id in enumerate(served.tokenizer.encode(text)[1:], start=1):
            assert rest[position - 1] == {
                str(token_id): {
                    "logprob": -float(position),
                    "rank": 2,
                    "decoded_token": served.tokenizer.token_text(token_id),
                },
                "7": {
                    "logprob": -0.25,
                    "rank": 1,
                    "decoded_token": served.tokenizer.token_text(7),
                },
            }
        assert len(choice["logprobs"]["tokens"]) == 1  # of the output alone


async def test_prompt_logprobs_of_chat(served: Served) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "prompt_logprobs": 0}
    answer = (await served.http.post("/v1/chat/completions", json=body)).json()
    [request] = served.engine.submitted.values()
    first, *rest = answer["prompt_logprobs"]
    assert first is None
    assert [list(objects) for objects in rest] == [[str(n)] for n in request.prompt_token_ids[1:]]
    assert answer["choices"][0]["logprobs"] is None


async def test_each_gets_as_many_alternatives_as_it_asked_for(served: Served) -> None:
    body = {"prompt": PROMPT, "echo": True, "max_tokens": 0}
    answer = await create(served, **body, logprobs=0, prompt_logprobs=2)
    [choice] = answer["choices"]
    assert [len(top) for top in choice["logprobs"]["top_logprobs"][1:]] == [1] * (
        len(choice["prompt_logprobs"]) - 1
    )
    assert {len(objects) for objects in choice["prompt_logprobs"][1:]} == {2}
    answer = await create(served, **body, logprobs=2, prompt_logprobs=0)
    [choice] = answer["choices"]
    assert {len(top) for top in choice["logprobs"]["top_logprobs"][1:]} == {2}
    assert {len(objects) for objects in choice["prompt_logprobs"][1:]} == {1}


async def test_a_prompt_that_was_only_scored_counts_in_the_metrics(served: Served) -> None:
    await create(served, prompt=[5, 6, 7], echo=True, logprobs=0, max_tokens=0)
    text = (await served.http.get("/metrics")).text
    assert 'penstock:prompt_tokens_total{model_name="tiny"} 3.0' in text
    assert 'penstock:generation_tokens_total{model_name="tiny"} 0.0' in text
    assert 'finished_reason="length",model_name="tiny"} 1.0' in text
