"""Several outputs to one prompt: n, best_of and beam search, whole and as streams."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from penstock.engine.request import BeamSearch

from ..conftest import ANSWER, Serve, Served

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
OTHER = "Another wörld 😀 says no."


def say_other(served: Served, index: int = 1) -> None:
    served.engine.scripts[index] = served.tokenizer.encode(OTHER)


def params_of(served: Served) -> Any:
    [request] = served.engine.submitted.values()
    return request.sampling_params


async def test_n_choices_of_one_request(served: Served) -> None:
    say_other(served)
    completion = await served.client.chat.completions.create(model="tiny", messages=HELLO, n=3)
    assert [choice.index for choice in completion.choices] == [0, 1, 2]
    assert [choice.message.content for choice in completion.choices] == [ANSWER, OTHER, ANSWER]
    assert [choice.finish_reason for choice in completion.choices] == ["stop"] * 3
    assert params_of(served).n == 3
    num_tokens = 2 * len(served.engine.script) + len(served.engine.scripts[1]) + 3  # with EOS
    assert completion.usage is not None
    assert completion.usage.completion_tokens == num_tokens
    assert completion.usage.prompt_tokens == len(served.tokenizer.encode(served.prompt_of()))
    assert completion.usage.prompt_tokens_details is not None
    assert completion.usage.prompt_tokens_details.cached_tokens == 2


async def test_a_stream_of_n_choices(serve: Serve) -> None:
    async with serve(step_s=0.001) as served:
        say_other(served)
        stream = await served.client.chat.completions.create(
            model="tiny", messages=HELLO, n=2, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    texts, kinds = {0: "", 1: ""}, {0: [], 1: []}
    for chunk in chunks[:-1]:
        [choice] = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        kinds[choice.index].append((choice.delta.role, choice.finish_reason))
    assert texts == {0: ANSWER, 1: OTHER}
    for seen in kinds.values():
        assert seen[0] == ("assistant", None)
        assert seen[-1] == (None, "stop")
        assert set(seen[1:-1]) == {(None, None)}
    # One is over while the other, whose text is of more tokens, goes on.
    reasons = [chunk.choices[0].finish_reason for chunk in chunks[:-1]]
    assert chunks[-2].choices[0].index == 1
    assert reasons.index("stop") < len(reasons) - 2
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == sum(
        len(script) + 1 for script in (served.engine.script, served.engine.scripts[1])
    )


async def test_a_stop_string_ends_its_branch_alone(serve: Serve) -> None:
    async with serve(step_s=0.005) as served:
        say_other(served)
        completion = await served.client.chat.completions.create(
            model="tiny", messages=HELLO, n=2, stop="says", max_tokens=60,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        assert completion.choices[1].message.content == OTHER[: OTHER.index("says")]
        assert completion.choices[1].finish_reason == "stop"
        assert completion.choices[0].finish_reason == "length"
        text = served.tokenizer.decode((served.engine.script * 60)[:60])
        assert completion.choices[0].message.content == text
        [request_id] = served.engine.submitted
        assert served.engine.aborted_branches == {(request_id, 1)}
        assert served.engine.aborted == set()
        num_stopped = completion.usage.completion_tokens - 60  # type: ignore[union-attr]
        assert 0 < num_stopped < len(served.engine.scripts[1])


async def test_when_the_last_branch_stops_the_request_is_aborted(serve: Serve) -> None:
    async with serve(step_s=0.005) as served:
        await served.client.chat.completions.create(
            model="tiny", messages=HELLO, n=2, stop="fake", extra_body={"ignore_eos": True}
        )
        await served.aborted()
        assert len(served.engine.aborted_branches) <= 1


async def test_prompts_times_n_are_numbered_through(served: Served) -> None:
    say_other(served)
    body = {"prompt": ["one", "two"], "n": 2, "max_tokens": 100}
    whole = (await served.http.post("/v1/completions", json=body)).json()
    texts = [(choice["index"], choice["text"]) for choice in whole["choices"]]
    assert texts == list(enumerate([ANSWER, OTHER] * 2))
    streamed = (await served.http.post("/v1/completions", json={**body, "stream": True})).text
    pieces = dict.fromkeys(range(4), "")
    reasons = {}
    for block in streamed.split("\n\n")[:-2]:
        [choice] = json.loads(block[6:])["choices"]
        pieces[choice["index"]] += choice["text"]
        reasons[choice["index"]] = choice["finish_reason"]
    assert list(pieces.items()) == texts
    assert set(reasons.values()) == {"stop"}


async def test_logprobs_of_each_choice(served: Served) -> None:
    say_other(served)
    served.engine.mean_logprobs[1] = -0.75
    completion = await served.client.completions.create(
        model="tiny", prompt="x", n=2, logprobs=1, max_tokens=100
    )
    for choice, text, logprob in zip(
        completion.choices, (ANSWER, OTHER), (-0.5, -0.75), strict=True
    ):
        lists = choice.logprobs
        assert lists is not None
        assert lists.text_offset is not None
        assert lists.token_logprobs is not None
        assert set(lists.token_logprobs) == {logprob}
        # Every token's text lies where its offset says, though some end inside a character.
        assert lists.text_offset == sorted(lists.text_offset)
        for token, offset in zip(lists.tokens or (), lists.text_offset, strict=True):
            if "\ufffd" not in token:
                assert text[offset : offset + len(token)] == token


async def test_best_of_keeps_the_likeliest(served: Served) -> None:
    say_other(served, index=2)
    served.engine.mean_logprobs = {0: -0.5, 1: -0.9, 2: -0.1, 3: -0.4}
    completion = await served.client.completions.create(
        model="tiny", prompt="x", n=2, best_of=4, max_tokens=100
    )
    assert [choice.index for choice in completion.choices] == [0, 1]
    assert [choice.text for choice in completion.choices] == [OTHER, ANSWER]
    assert [choice.logprobs for choice in completion.choices] == [None, None]
    assert params_of(served).best_of == 4
    # All that was computed is paid for.
    num_tokens = 3 * len(served.engine.script) + len(served.engine.scripts[2]) + 4
    assert completion.usage is not None
    assert completion.usage.completion_tokens == num_tokens
    shown = await served.client.completions.create(
        model="tiny", prompt="x", best_of=4, logprobs=0, max_tokens=100
    )
    [choice] = shown.choices
    assert choice.logprobs is not None
    assert set(choice.logprobs.token_logprobs or ()) == {-0.1}


async def test_best_of_is_a_mean_and_no_sum(served: Served) -> None:
    served.engine.scripts[1] = served.engine.script[:3]
    served.engine.mean_logprobs = {0: -0.5, 1: -0.6}  # its sum is nearer to 0
    completion = await served.client.completions.create(
        model="tiny", prompt="x", best_of=2, max_tokens=100
    )
    assert completion.choices[0].text == ANSWER


async def test_best_of_equal_to_n_may_be_streamed(served: Served) -> None:
    stream = await served.client.completions.create(
        model="tiny", prompt="x", n=2, best_of=2, stream=True, max_tokens=2
    )
    indices = [chunk.choices[0].index async for chunk in stream]
    assert set(indices) == {0, 1}


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_beam_search(served: Served, is_streamed: bool) -> None:
    say_other(served)
    body = {
        "prompt": "x", "n": 2, "use_beam_search": True, "length_penalty": 0.5, "max_tokens": 100,
        "early_stopping": "never", "logprobs": 1, "stream": is_streamed,
    }  # fmt: skip
    response = await served.http.post("/v1/completions", json=body)
    if is_streamed:
        blocks = response.text.split("\n\n")[:-2]
        choices = [json.loads(block[6:])["choices"][0] for block in blocks]
        # Of each hypothesis its text in one piece, and its end.
        assert [choice["index"] for choice in choices] == [0, 0, 1, 1]
        choices = choices[::2]
    else:
        choices = response.json()["choices"]
    assert [choice["text"] for choice in choices] == [ANSWER, OTHER]
    assert len(choices[1]["logprobs"]["tokens"]) == len(served.engine.scripts[1])
    params = params_of(served)
    assert params.beam_search == BeamSearch(width=2, length_penalty=0.5, early_stopping="never")
    # The model's defaults (temperature 0.6, top_k 20) shape draws, of which there are none.
    assert (params.temperature, params.top_k, params.n) == (0.0, 0, 2)


async def test_beam_search_in_chat(served: Served) -> None:
    completion = await served.client.chat.completions.create(
        model="tiny", messages=HELLO, stop="fake", extra_body={"use_beam_search": True}
    )
    [choice] = completion.choices
    assert choice.message.content == ANSWER[: ANSWER.index("fake")]
    assert choice.finish_reason == "stop"
    assert params_of(served).beam_search == BeamSearch(width=1)


async def test_client_gone_aborts_the_request_with_all_its_branches(serve: Serve) -> None:
    async with serve(step_s=0.01) as served:
        body = {"messages": HELLO, "n": 4, "ignore_eos": True, "max_tokens": 400}
        call = asyncio.create_task(served.http.post("/v1/chat/completions", json=body))
        await served.submitted()
        call.cancel()
        await served.aborted()


async def test_more_than_fits_is_refused_with_the_numbers(serve: Serve) -> None:
    async with serve(info={"num_blocks": 20}) as served:  # 320 tokens
        with pytest.raises(openai.BadRequestError) as caught:
            await served.client.chat.completions.create(
                model="tiny", messages=HELLO, n=4, max_tokens=100
            )
        assert caught.value.param == "n"
        for number in ("4", "100", "20"):
            assert number in caught.value.message
        await served.client.chat.completions.create(
            model="tiny", messages=HELLO, n=4, max_tokens=50
        )
        with pytest.raises(openai.BadRequestError) as caught:
            await served.client.chat.completions.create(model="tiny", messages=HELLO, n=17)
        assert "17" in caught.value.message
        assert "16" in caught.value.message


async def test_without_a_limit_the_output_is_cut_to_what_fits(serve: Serve) -> None:
    async with serve(info={"num_blocks": 20}) as served:
        await served.client.chat.completions.create(model="tiny", messages=HELLO, n=4)
        num_prompt_tokens = len(served.tokenizer.encode(served.prompt_of()))
        # 1 or 2 blocks of prompt are shared, the rest of 20 is four times the same.
        num_blocks = (20 - num_prompt_tokens // 16) // 4 + num_prompt_tokens // 16
        assert params_of(served).max_tokens == num_blocks * 16 - num_prompt_tokens + 1


async def test_one_branch_failing_ends_the_answer(served: Served) -> None:
    served.engine.failure = "not a distribution"
    response = await served.http.post("/v1/chat/completions", json={"messages": HELLO, "n": 2})
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "not a distribution"
