"""What a caller says about KV: salt, priority, retention, preparing a prompt and forgetting it."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.responses import ResponsesServerEvent
from pydantic import TypeAdapter

from penstock.engine.request import Request, Retention

from ..conftest import ANSWER, Serve, Served, until
from ..sockets import send, until_end

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponsesServerEvent)
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ("/v1/completions", {"prompt": "x"}),
    ("/v1/responses", {"input": "x"}),
]


def requests_of(served: Served) -> list[Request]:
    return list(served.engine.submitted.values())


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_salt_and_priority_reach_the_engine(
    serve: Serve, path: str, body: dict[str, Any]
) -> None:
    async with serve(info={"scheduling_policy": "priority"}) as served:
        hints = {"cache_salt": "tenant 7", "priority": -3}
        assert (await served.http.post(path, json=body)).status_code == 200
        assert (await served.http.post(path, json={**body, **hints})).status_code == 200
        plain, hinted = requests_of(served)
        assert (plain.cache_salt, plain.priority) == ("", 0)
        assert (hinted.cache_salt, hinted.priority) == ("tenant 7", -3)


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_without_the_policy_a_priority_is_refused(
    served: Served, path: str, body: dict[str, Any]
) -> None:
    assert (await served.http.post(path, json={**body, "priority": 0})).status_code == 200
    response = await served.http.post(path, json={**body, "priority": 1})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "priority")
    assert "--scheduling-policy priority" in error["message"]


@pytest.mark.parametrize("retention_s", [0.0, 90.0])
async def test_stored_turns_are_worth_keeping(serve: Serve, retention_s: float) -> None:
    async with serve(session_retention_s=retention_s) as served:
        await served.client.responses.create(model="tiny", input="x")
        await served.client.responses.create(model="tiny", input="x", store=False)
        await served.client.completions.create(model="tiny", prompt="x")
        hint = Retention(duration_s=90.0) if retention_s else None
        assert [request.retention for request in requests_of(served)] == [hint, None, None]


async def test_a_prepared_prompt_can_be_continued(served: Served) -> None:
    async with served.connect() as socket:
        await send(
            socket, type="response.create", generate=False, instructions="be kind", input="one"
        )
        events = await until_end(socket)
        for event in events:
            EVENTS.validate_python(event)
        kinds = ["response.created", "response.in_progress", "response.completed"]
        assert [event["type"] for event in events] == kinds
        assert [event["sequence_number"] for event in events] == [0, 1, 2]
        response = events[-1]["response"]
        assert (response["status"], response["output"]) == ("completed", [])
        assert response["incomplete_details"] is None
        assert response["usage"]["output_tokens"] == 0
        [prepared] = requests_of(served)
        assert prepared.sampling_params.max_tokens == 0
        assert prepared.retention is not None
        assert response["usage"]["input_tokens"] == len(prepared.prompt_token_ids)
        prompt = "<system>be kind\n<user>one\n"
        assert served.prompt_of() == prompt
        # Chained, with more input or with none; there is no empty answer in between.
        await send(
            socket, type="response.create", previous_response_id=response["id"], input="two",
            instructions="be kind",
        )  # fmt: skip
        assert (await until_end(socket))[-1]["type"] == "response.completed"
        assert served.prompt_of() == prompt + "<user>two\n<assistant>"
        for empty in ({"input": []}, {}):
            await send(socket, type="response.create", previous_response_id=response["id"], **empty)
            assert (await until_end(socket))[-1]["response"]["output"]
            assert served.prompt_of() == "<user>one\n<assistant>"
    stored = (await served.http.get(f"/v1/responses/{response['id']}")).json()
    assert stored == response


async def test_preparing_by_openais_cache_options(served: Served) -> None:
    response = await served.client.responses.create(
        model="tiny", input="one", extra_body={"prompt_cache_options": {"prewarm": True}}
    )
    assert (response.status, response.output) == ("completed", [])
    await served.client.responses.create(
        model="tiny", input="two", previous_response_id=response.id
    )
    assert served.prompt_of() == "<user>one\n<user>two\n<assistant>"


async def test_a_prepared_prompt_that_failed(served: Served) -> None:
    served.engine.refusal = "no room"
    async with served.connect() as socket:
        await send(socket, type="response.create", generate=False, input="one")
        *_, last = await until_end(socket)
        EVENTS.validate_python(last)
        assert last["type"] == "response.failed"
        assert last["response"]["output"] == []
        assert last["response"]["error"] == {"code": "invalid_prompt", "message": "no room"}


async def test_a_refused_response_is_a_plain_400(served: Served) -> None:
    served.engine.refusal, served.engine.refused_param = "no room", "input"
    with pytest.raises(openai.BadRequestError) as caught:
        await served.client.responses.create(model="tiny", input="x")
    assert caught.value.param == "input"


async def test_drop_prefix(served: Served) -> None:
    async with served.connect() as socket:
        await send(socket, type="response.create", input="one", cache_salt="s")
        response_id = (await until_end(socket))[-1]["response"]["id"]
        await send(socket, type="penstock.drop_prefix", response_id=response_id, stream_id="lane")
        assert json.loads(await socket.recv()) == {
            "type": "penstock.prefix_dropped", "response_id": response_id, "stream_id": "lane",
        }  # fmt: skip
        await until(lambda: len(served.engine.dropped) == 1)
        [request], [dropped] = requests_of(served), served.engine.dropped
        end = (*served.engine.script, 0)
        assert dropped.token_ids == (*request.prompt_token_ids, *end)
        assert dropped.cache_salt == "s"
        # The turn itself is still there.
        await send(socket, type="response.create", input="two", previous_response_id=response_id)
        assert (await until_end(socket))[-1]["type"] == "response.completed"
        assert served.prompt_of().startswith(f"<user>one\n<assistant>{ANSWER}\n")
        assert requests_of(served)[-1].cache_salt == ""  # of one request


async def test_deleting_a_response_forgets_its_prefix(served: Served) -> None:
    response = await served.client.responses.create(model="tiny", input="one")
    await served.client.responses.delete(response.id)
    await until(lambda: len(served.engine.dropped) == 1)
    with pytest.raises(openai.NotFoundError):
        await served.client.responses.delete(response.id)
    assert len(served.engine.dropped) == 1
