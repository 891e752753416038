"""Chat completions, with the stock client and on the bare socket."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from penstock.engine.request import Notice

from ..conftest import ANSWER, Serve, Served

HELLO: list[Any] = [{"role": "user", "content": "hello"}]


async def test_whole_answer(served: Served) -> None:
    completion = await served.client.chat.completions.create(model="tiny", messages=HELLO)
    [choice] = completion.choices
    assert choice.message.content == ANSWER
    assert choice.finish_reason == "stop"
    assert completion.usage is not None
    assert completion.usage.completion_tokens == len(served.engine.script) + 1  # with EOS
    assert completion.usage.prompt_tokens == len(served.tokenizer.encode(served.prompt_of()))
    assert completion.usage.prompt_tokens_details is not None
    assert completion.usage.prompt_tokens_details.cached_tokens == 2


async def test_stream_with_usage(served: Served) -> None:
    stream = await served.client.chat.completions.create(
        model="tiny", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == ANSWER  # whole characters, although tokens end inside some
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-2:] == [None, "stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(served.engine.script) + 1
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_continuous_usage(served: Served) -> None:
    stream = await served.client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )
    counts = [chunk.usage.completion_tokens async for chunk in stream if chunk.usage]
    assert counts == sorted(counts)
    assert counts[0] > 0  # the choice begins when its first token is there
    assert counts[-1] == len(served.engine.script) + 1


@pytest.mark.parametrize(
    ("path", "prompt"),
    [("/v1/chat/completions", {"messages": HELLO}), ("/v1/completions", {"prompt": "hello"})],
)
@pytest.mark.parametrize(
    "asked",
    [
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"return_token_ids": True},
    ],
)
async def test_tokens_without_text_are_told_where_more_than_text_is(
    served: Served, path: str, prompt: dict[str, Any], asked: dict[str, Any]
) -> None:
    """As with `ignore_eos` a model may say its end over and over, whose text is not shown."""
    engine = served.engine
    engine.script = script = [*served.tokenizer.encode("H"), *[0] * 9]
    engine.holds_in = num_first = len(script) - 4  # what is told by then has come by itself
    body = {"stream": True, "ignore_eos": True, "max_tokens": len(script), **prompt, **asked}
    text, token_ids, counts = "", [], [0]
    async with served.http.stream("POST", path, json=body) as response:
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            for choice in chunk["choices"]:
                text += choice.get("text") or choice.get("delta", {}).get("content") or ""
                token_ids += choice.get("token_ids", ())
            if usage := chunk.get("usage"):
                counts.append(usage["completion_tokens"])
            if max(counts[-1], len(token_ids)) == num_first:
                engine.may_speak.set()
    assert text == "H"
    assert counts == sorted(counts)
    assert token_ids == script if "return_token_ids" in asked else counts[-1] == len(script)


async def test_stream_on_the_wire(served: Served) -> None:
    body = {"messages": HELLO, "stream": True}  # without a model: the only one
    response = await served.http.post("/v1/chat/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    assert all(block.startswith("data: {") for block in blocks[:-2])
    assert json.loads(blocks[-3][6:])["choices"][0]["finish_reason"] == "stop"


async def test_silence_is_filled_from_the_start(serve: Serve) -> None:
    async with serve(ping_interval_s=0.05) as served:
        served.engine.may_speak.clear()
        body = {"messages": HELLO, "stream": True, "max_tokens": 2}
        async with served.http.stream("POST", "/v1/chat/completions", json=body) as response:
            text = ""
            async for piece in response.aiter_text():
                text += piece
                if text.count(": ping\n\n") >= 3:
                    served.engine.may_speak.set()
    blocks = text.split("\n\n")  # a comment is a block of its own: glued ones break clients
    assert blocks[:3] == [": ping"] * 3
    assert all(block == ": ping" or block.startswith("data: ") for block in blocks[:-1])
    assert blocks[-2:] == ["data: [DONE]", ""]


async def test_messages_become_the_prompt(served: Served) -> None:
    await served.client.chat.completions.create(
        model="tiny",
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": text} for text in "ab"]},
            {"role": "assistant", "content": "c", "refusal": None, "tool_calls": []},
            {"role": "user", "content": "d"},
        ],
    )  # fmt: skip
    assert served.prompt_of() == "<system>be brief\n<user>a\nb\n<assistant>c\n<user>d\n<assistant>"


async def test_sampling_parameters_and_their_defaults(served: Served) -> None:
    create = served.client.chat.completions.create
    await create(model="tiny", messages=HELLO)
    silent = served.engine.submitted.popitem()[1].sampling_params
    assert (silent.temperature, silent.top_k, silent.top_p) == (0.6, 20, 1.0)  # the model's
    assert silent.max_tokens == 1024 - len(served.tokenizer.encode("<user>hello\n<assistant>"))
    assert silent.seed
    await create(
        model="tiny", messages=HELLO, temperature=0, top_p=0.5, seed=-1, max_completion_tokens=3,
        logit_bias={"7": -100}, presence_penalty=1, frequency_penalty=-1,
        extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2,
                    "ignore_eos": True, "stop_token_ids": [9], "chat_template_kwargs": {},
                    "top_n_sigma": 1.5},
    )  # fmt: skip
    asked = served.engine.submitted.popitem()[1].sampling_params
    assert (asked.temperature, asked.top_p, asked.top_k, asked.min_p) == (0, 0.5, 5, 0.1)
    assert (asked.repetition_penalty, asked.presence_penalty) == (1.1, 1)
    assert (silent.top_n_sigma, asked.top_n_sigma) == (0, 1.5)
    assert (asked.frequency_penalty, asked.logit_bias) == (-1, {7: -100})
    assert (asked.max_tokens, asked.min_tokens, asked.ignore_eos) == (3, 2, True)
    assert (asked.stop_token_ids, asked.seed) == ((9,), (1 << 64) - 1)


async def test_seeds_are_drawn_anew(served: Served) -> None:
    for _ in range(2):
        await served.client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=1)
    first, second = (item.sampling_params.seed for item in served.engine.submitted.values())
    assert first != second


async def test_max_tokens_is_an_upper_bound(served: Served) -> None:
    completion = await served.client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=3
    )
    assert completion.choices[0].finish_reason == "length"
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 3
    await served.client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=10**6)


async def test_documents_reach_the_template(serve: Serve) -> None:
    documents = [{"title": "Rhine", "text": "A river."}]
    async with serve(trust_request_chat_template=True) as served:
        body = {"model": "tiny", "messages": HELLO, "documents": documents}
        answer = await served.http.post("/v1/chat/completions", json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "documents")
        assert "shows no documents" in error["message"]
        body["chat_template"] = "{{ documents | tojson }}"
        await served.http.post("/v1/chat/completions", json=body)
        assert json.loads(served.prompt_of()) == documents
        for none in ([], None):
            answer = await served.http.post(
                "/v1/chat/completions", json={**body, "documents": none}
            )
            assert answer.status_code == 200
            assert served.prompt_of() == "null"


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("is_included", [False, True])
async def test_a_stop_string_may_be_a_special_token(
    serve: Serve, skips: bool, is_included: bool
) -> None:
    """Although such tokens are left out of the text."""
    async with serve() as served:
        script = served.tokenizer.encode("Hello<|end|>Hello")
        served.engine.script = script
        for stop in ("<|end|>", ["never", "\n<|end|>"]):
            for stream in (False, True):
                answer = await served.client.chat.completions.create(
                    model="tiny",
                    messages=[{"role": "user", "content": "hi"}],
                    stop=stop,
                    stream=stream,
                    extra_body={
                        "include_stop_str_in_output": is_included,
                        "skip_special_tokens": skips,
                        "ignore_eos": True,
                        "max_tokens": 40,
                    },
                )
                text, reason = "", None
                if stream:
                    async for chunk in answer:
                        for choice in chunk.choices:
                            text += choice.delta.content or ""
                            reason = choice.finish_reason
                else:
                    [choice] = answer.choices
                    text, reason = choice.message.content, choice.finish_reason
                    assert answer.usage.completion_tokens == script.index(0) + 1
                assert (text, reason) == ("Hello" + "<|end|>" * is_included, "stop")


@pytest.mark.parametrize("is_included", [False, True])
async def test_stop_string_ends_the_sequence(serve: Serve, is_included: bool) -> None:
    async with serve(step_s=0.01) as served:
        completion = await served.client.chat.completions.create(
            model="tiny",
            messages=HELLO,
            stop=["fake", "never"],
            extra_body={"include_stop_str_in_output": is_included, "ignore_eos": True},
        )
        await served.aborted()
        text = ANSWER[: ANSWER.index("fake") + 4 * is_included]
        assert completion.choices[0].message.content == text
        assert completion.choices[0].finish_reason == "stop"
        assert completion.usage is not None
        assert completion.usage.completion_tokens < len(served.engine.script)


async def test_logprobs(served: Served) -> None:
    completion = await served.client.chat.completions.create(
        model="tiny", messages=HELLO, logprobs=True, top_logprobs=2
    )
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == len(served.engine.script)  # EOS says nothing
    spoken = b"".join(bytes(token.bytes or []) for token in logprobs.content)
    assert spoken.decode() == ANSWER
    assert logprobs.content[0].logprob == -0.5
    assert [item.logprob for item in logprobs.content[0].top_logprobs] == [-0.5, -9999.0]
    stream = await served.client.chat.completions.create(
        model="tiny", messages=HELLO, logprobs=True, stream=True
    )
    streamed = [
        token
        async for chunk in stream
        if chunk.choices[0].logprobs
        for token in chunk.choices[0].logprobs.content or []
    ]
    assert [token.token for token in streamed] == [token.token for token in logprobs.content]


async def test_request_template_needs_trust(serve: Serve) -> None:
    extra = {
        "chat_template": "{{ messages[0].content }}{{ mood }}",
        "chat_template_kwargs": {"mood": "!"},
    }
    async with serve() as served:
        with pytest.raises(openai.BadRequestError) as caught:
            await served.client.chat.completions.create(
                model="tiny", messages=HELLO, extra_body=extra
            )
        assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "chat_template")
    async with serve(trust_request_chat_template=True) as served:
        await served.client.chat.completions.create(model="tiny", messages=HELLO, extra_body=extra)
        assert served.prompt_of() == "hello!"


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_client_gone_aborts(serve: Serve, is_streamed: bool) -> None:
    body = {"messages": HELLO, "stream": is_streamed, "ignore_eos": True}
    async with serve(step_s=0.01) as served:
        call = asyncio.create_task(served.http.post("/v1/chat/completions", json=body))
        await served.submitted()
        await asyncio.sleep(0.05)
        call.cancel()
        await served.aborted()
        assert served.engine.aborted == set(served.engine.submitted)


async def test_as_fast_as_the_engine_can_nothing_is_lost(served: Served) -> None:
    body = {"messages": HELLO, "stream": True, "ignore_eos": True, "max_tokens": 300}
    response = await served.http.post("/v1/chat/completions", json=body)
    events = [json.loads(block[6:]) for block in response.text.split("\n\n")[:-2]]
    spoken = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    assert spoken == served.tokenizer.decode((served.engine.script * 300)[:300])


@pytest.mark.usefixtures("soon_alarmed")
@pytest.mark.parametrize("is_dead", [False, True])
async def test_engine_failure_ends_a_stream_typed(serve: Serve, is_dead: bool) -> None:
    async with serve(step_s=0.01, engine_wait_s=0.1) as served:
        served.engine.failure = None if is_dead else "no such luck"
        stream = await served.client.chat.completions.create(
            model="tiny", messages=HELLO, stream=True, extra_body={"ignore_eos": True}
        )
        await anext(stream)
        if is_dead:
            await served.engine.die()
        with pytest.raises(openai.APIError) as caught:
            async for _ in stream:
                pass
        code = "engine_unavailable" if is_dead else "generation_failed"
        assert caught.value.code == code


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_what_the_engine_refuses_is_a_plain_400(served: Served, is_streamed: bool) -> None:
    served.engine.refusal, served.engine.refused_param = "it does not fit", "max_tokens"
    with pytest.raises(openai.BadRequestError) as caught:
        await served.client.chat.completions.create(
            model="tiny", messages=HELLO, stream=is_streamed
        )
    assert (caught.value.code, caught.value.param) == ("invalid_value", "max_tokens")
    assert "it does not fit" in caught.value.message


async def test_a_refusal_after_silence_is_an_error_frame(serve: Serve) -> None:
    """A comment has started the response by then."""
    async with serve(ping_interval_s=0.02) as served:
        served.engine.may_speak.clear()
        served.engine.notices = {0: Notice.PREEMPTED}
        served.engine.failure = "no such luck"
        body = {"messages": HELLO, "stream": True}
        async with served.http.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200
            text = ""
            async for piece in response.aiter_text():
                text += piece
                served.engine.may_speak.set()
        assert text.startswith(": ping")
        assert text.endswith("data: [DONE]\n\n")
        assert "no such luck" in text


async def test_error_frame_then_done(serve: Serve) -> None:
    async with serve(step_s=0.01) as served:
        served.engine.failure = "no such luck"
        body = {"messages": HELLO, "stream": True}
        response = await served.http.post("/v1/chat/completions", json=body)
        *_, error, done, rest = response.text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        assert json.loads(error[6:])["error"]["message"] == "no such luck"
