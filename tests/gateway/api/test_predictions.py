"""`prediction`: what reaches the engine of it, and how much of it an answer says was right."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ..conftest import ANSWER, Serve, Served
from ..sockets import send, until_end
from .keyed import BODIES, CHAT, COMPLETIONS, chunks_of, post, text_of

PARTS = [{"type": "text", "text": ANSWER[:9]}, {"type": "text", "text": ANSWER[9:]}]
SAME = {"type": "content", "content": ANSWER}
DETAILS = "completion_tokens_details"


def predicted(served: Served) -> tuple[int, ...]:
    """Of the newest request."""
    return list(served.engine.submitted.values())[-1].prediction_token_ids


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("content", [ANSWER, PARTS])
async def test_it_reaches_the_engine_and_is_counted(
    served: Served, path: str, content: Any
) -> None:
    num_tokens = len(served.engine.script)
    prediction = {"type": "content", "content": content}
    whole = (await served.http.post(path, json=BODIES[path] | {"prediction": prediction})).json()
    assert predicted(served) == tuple(served.engine.script)
    counts = {"accepted_prediction_tokens": num_tokens, "rejected_prediction_tokens": 0}
    assert whole["usage"][DETAILS] == counts
    assert whole["usage"]["completion_tokens"] == num_tokens + 1  # with EOS
    without = (await served.http.post(path, json=BODIES[path])).json()
    assert whole["choices"] == without["choices"]
    assert DETAILS not in without["usage"]
    assert predicted(served) == ()


async def test_what_is_wrong_in_it_is_counted_too(served: Served) -> None:
    """With the stock client, whole and as a stream, whose running counts have none of it."""
    wrong = "Well. " + ANSWER.replace("speaking", "silent")
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hello"}],
        "prediction": {"type": "content", "content": wrong},
    }
    completion = await served.client.chat.completions.create(**asked)
    assert completion.usage is not None
    details = completion.usage.completion_tokens_details
    assert details is not None
    right, rejected = details.accepted_prediction_tokens, details.rejected_prediction_tokens
    assert right is not None
    assert rejected is not None
    assert 0.7 * len(served.engine.script) < right < len(served.engine.script)
    assert right + rejected == len(predicted(served)) == len(served.tokenizer.encode(wrong))

    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = await served.client.chat.completions.create(
        **asked, stream=True, stream_options=options
    )
    *running, last = [chunk.usage async for chunk in stream]
    assert last is not None
    assert last.completion_tokens_details == details
    assert all(usage and usage.completion_tokens_details is None for usage in running)


async def test_each_choice_counts(served: Served) -> None:
    served.engine.scripts[1] = [5]
    answer = await served.http.post(CHAT, json=BODIES[CHAT] | {"prediction": SAME, "n": 2})
    num_tokens = len(served.engine.script)
    assert answer.json()["usage"][DETAILS] == {
        "accepted_prediction_tokens": num_tokens,
        "rejected_prediction_tokens": num_tokens,
    }


@pytest.mark.parametrize("max_model_len", [64, 8192])
async def test_a_long_one_is_cut_to_the_context(serve: Serve, max_model_len: int) -> None:
    async with serve(info={"max_model_len": max_model_len}) as served:
        prediction = {"type": "content", "content": "Hello, " * 100_000}
        answer = await served.http.post(CHAT, json=BODIES[CHAT] | {"prediction": prediction})
        assert answer.status_code == 200, answer.text
        assert len(predicted(served)) == max_model_len
        assert sum(answer.json()["usage"][DETAILS].values()) == max_model_len
        assert served.tokenizer.decode(predicted(served)).startswith("Hello, Hello, ")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_with_a_key_each_reader_gets_the_same_counts(served: Served, path: str) -> None:
    options = {"include_usage": True}
    asked = {"prediction": SAME, "stream": True, "stream_options": options}
    first, again = [chunks_of((await post(served.http, path, **asked)).text) for _ in range(2)]
    assert len(served.engine.submitted) == 1
    assert text_of(first) == text_of(again) == ANSWER
    assert first[-1]["usage"] == again[-1]["usage"]
    details = first[-1]["usage"][DETAILS]
    assert details["accepted_prediction_tokens"] == len(served.engine.script)


async def test_responses_take_one_over_both_transports(served: Served) -> None:
    answer = await served.http.post("/v1/responses", json={"input": "x", "prediction": SAME})
    assert answer.json()["output"][0]["content"][0]["text"] == ANSWER
    assert predicted(served) == tuple(served.engine.script)
    async with served.connect() as socket:
        await send(socket, type="response.create", input="y", prediction=SAME)
        assert "".join(event.get("delta", "") for event in await until_end(socket)) == ANSWER
    assert len(served.engine.submitted) == 2
    assert predicted(served) == tuple(served.engine.script)


async def test_a_response_says_how_many_drafts_were_right(served: Served) -> None:
    """An extension of its usage, stored with it; absent where there were none."""
    plain = (await served.http.post("/v1/responses", json={"input": "x"})).json()
    assert "penstock" not in plain["usage"]
    served.engine.drafts = (5, 3)
    response = (await served.http.post("/v1/responses", json={"input": "x"})).json()
    num_tokens = response["usage"]["output_tokens"]
    assert response["usage"]["penstock"] == {
        "draft_tokens": 5 * num_tokens,
        "accepted_draft_tokens": 3 * num_tokens,
    }
    stored = (await served.http.get(f"/v1/responses/{response['id']}")).json()
    assert stored["usage"] == response["usage"]


async def test_speculation_can_be_turned_off(served: Served) -> None:
    for path, body in (*BODIES.items(), ("/v1/responses", {"input": "x"})):
        for extra, is_on in (({}, True), ({"penstock": {"speculation": False}}, False)):
            answer = await served.http.post(path, json=body | extra)
            assert answer.status_code == 200, answer.text
            request = list(served.engine.submitted.values())[-1]
            assert request.sampling_params.speculation is is_on


async def test_token_ids_that_the_model_does_not_have_are_refused(serve: Serve) -> None:
    async with serve(info={"vocab_size": 10}) as served:
        body = json.dumps({"prompt": [1], "prediction": SAME})
        answer = await served.http.post(COMPLETIONS, content=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "prediction"
