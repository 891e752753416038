"""The Responses API over HTTP: events, multi-turn, reading back."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from ..conftest import ANSWER, Serve, Served

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
START = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
]
END = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]


async def test_whole_response(served: Served) -> None:
    response = await served.client.responses.create(
        model="tiny", input="hello", instructions="be kind", metadata={"a": "b"}
    )
    assert response.output_text == ANSWER
    assert response.status == "completed"
    assert response.metadata == {"a": "b"}
    assert response.instructions == "be kind"
    assert response.usage is not None
    assert response.usage.output_tokens == len(served.engine.script) + 1
    assert response.usage.input_tokens_details.cached_tokens == 2
    assert served.prompt_of() == "<system>be kind\n<user>hello\n<assistant>"
    Response.model_validate(response.model_dump())


async def test_input_tokens_are_counted_as_a_response_would_have_them(served: Served) -> None:
    first = await served.client.responses.create(model="tiny", input="hello")
    conversation = await served.client.conversations.create(
        items=[{"type": "message", "role": "user", "content": "hi"}]
    )
    asked: list[dict[str, Any]] = [
        {"input": "hello", "instructions": "be kind"},
        {"input": "more", "previous_response_id": first.id},
        {"input": "more", "conversation": conversation.id},
        {"input": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]},
    ]
    for body in asked:
        count = await served.client.responses.input_tokens.count(model="tiny", **body)
        assert count.object == "response.input_tokens"
        response = await served.client.responses.create(model="tiny", **body)
        assert response.usage is not None
        assert count.input_tokens == response.usage.input_tokens
    # What does not fit is counted too: that is what a caller wants to know.
    count = await served.client.responses.input_tokens.count(model="tiny", input="x" * 2000)
    assert count.input_tokens > 1024
    assert len(served.engine.submitted) == 1 + len(asked)
    with pytest.raises(openai.BadRequestError) as caught:
        await served.client.responses.input_tokens.count(input="x", previous_response_id="resp_1")
    assert caught.value.code == "previous_response_not_found"


async def test_stream_of_events(served: Served) -> None:
    stream = await served.client.responses.create(model="tiny", input="hello", stream=True)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == START
    assert kinds[-4:] == [*END, "response.completed"]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    for event in events:
        EVENTS.validate_python(event.model_dump(warnings=False), strict=False)
    assert "".join(getattr(event, "delta", "") for event in events) == ANSWER


async def test_stream_helper_of_the_client(served: Served) -> None:
    async with served.client.responses.stream(model="tiny", input="hello") as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_response()
    assert final.output_text == ANSWER


async def test_events_on_the_wire(served: Served) -> None:
    response = await served.http.post("/v1/responses", json={"input": "x", "stream": True})
    for block in response.text.split("\n\n")[:-1]:
        name, payload = block.split("\n")
        event = json.loads(payload.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        EVENTS.validate_python(event)


async def test_conversation_by_previous_response(served: Served) -> None:
    create = served.client.responses.create
    first = await create(
        model="tiny", input="one", instructions="not inherited", max_output_tokens=2
    )
    assert first.status == "incomplete"
    assert first.incomplete_details is not None
    assert first.incomplete_details.reason == "max_output_tokens"
    second = await create(model="tiny", input="two", previous_response_id=first.id)
    assert served.prompt_of() == (
        f"<user>one\n<assistant>{first.output_text}\n<user>two\n<assistant>"
    )
    await create(
        model="tiny",
        input=[{"role": "user", "content": [{"type": "input_text", "text": "three"}]}],
        previous_response_id=second.id,
    )
    assert served.prompt_of().endswith(f"<user>two\n<assistant>{ANSWER}\n<user>three\n<assistant>")
    # A sibling of the second turn.
    await create(model="tiny", input="other", previous_response_id=first.id)
    assert served.prompt_of().count("<user>") == 2


async def test_output_items_may_come_back_as_input(served: Served) -> None:
    first = await served.client.responses.create(model="tiny", input="one")
    items: list[Any] = [item.model_dump() for item in first.output]
    await served.client.responses.create(
        model="tiny", input=[*items, {"role": "user", "content": "two"}]
    )
    assert served.prompt_of() == f"<assistant>{ANSWER}\n<user>two\n<assistant>"


async def test_retrieve_and_delete(served: Served) -> None:
    client = served.client
    response = await client.responses.create(model="tiny", input="one")
    assert (await client.responses.retrieve(response.id)).output_text == ANSWER
    stream = await client.responses.retrieve(response.id, stream=True, starting_after=5)
    numbers = [event.sequence_number async for event in stream]
    assert numbers[0] == 6
    await client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(response.id)


@pytest.mark.parametrize("is_stored_off", [False, True])
async def test_unknown_previous_response(served: Served, is_stored_off: bool) -> None:
    previous = "resp_nothing"
    if is_stored_off:
        previous = (await served.client.responses.create(model="tiny", input="a", store=False)).id
    with pytest.raises(openai.BadRequestError) as caught:
        await served.client.responses.create(
            model="tiny", input="two", previous_response_id=previous
        )
    assert caught.value.code == "previous_response_not_found"
    assert caught.value.param == "previous_response_id"


async def test_logprobs(served: Served) -> None:
    response = await served.client.responses.create(
        model="tiny", input="a", include=["message.output_text.logprobs"], top_logprobs=2
    )
    [part] = response.output[0].content
    assert len(part.logprobs) == len(served.engine.script)
    assert part.logprobs[0].top_logprobs[1].logprob == -9999.0


async def test_client_gone_aborts_what_is_not_stored(serve: Serve) -> None:
    async with serve(step_s=0.01) as served:
        body = {"input": "x", "ignore_eos": True, "store": False}
        call = asyncio.create_task(served.http.post("/v1/responses", json=body))
        await served.submitted()
        call.cancel()
        await served.aborted()
        [response_id] = served.engine.submitted
        assert (await served.http.get(f"/v1/responses/{response_id}")).status_code == 404


@pytest.mark.usefixtures("soon_alarmed")
async def test_engine_death_is_response_failed(serve: Serve) -> None:
    async with serve(step_s=0.01, engine_wait_s=0.1) as served:
        stream = await served.client.responses.create(
            model="tiny", input="x", stream=True, extra_body={"ignore_eos": True}
        )
        kinds = []
        async for event in stream:
            kinds.append(event.type)
            if len(kinds) == 6:
                await served.engine.die()
        assert kinds[-1] == "response.failed"
        assert event.response.error.message == "the engine died: out of memory"
        assert event.response.output[0].content  # what there was


@pytest.mark.usefixtures("soon_alarmed")
async def test_engine_death_fails_a_plain_request(serve: Serve) -> None:
    async with serve(step_s=0.01, engine_wait_s=0.1) as served:
        body = {"input": "x", "ignore_eos": True}
        asked = asyncio.create_task(served.http.post("/v1/responses", json=body))
        await served.submitted()
        await served.engine.die()
        response = await asked
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "engine_unavailable"
