"""The Responses WebSocket mode: lanes, cancel, errors, and the stock client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
import websockets
from openai.types.responses import ResponsesServerEvent
from pydantic import TypeAdapter

from ..conftest import ANSWER, Serve, Served
from ..sockets import TERMINAL, send, until_end

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponsesServerEvent)


async def test_turns_on_one_socket(served: Served) -> None:
    async with served.connect() as socket:
        await send(socket, type="response.create", model="tiny", input="one")
        first = await until_end(socket)
        assert [event["sequence_number"] for event in first] == list(range(len(first)))
        assert "".join(event.get("delta", "") for event in first) == ANSWER
        assert all("stream_id" not in event for event in first)
        for event in first:
            EVENTS.validate_python(event)
        previous = first[-1]["response"]["id"]
        await send(socket, type="response.create", input="two", previous_response_id=previous)
        await until_end(socket)
    assert served.prompt_of() == f"<user>one\n<assistant>{ANSWER}\n<user>two\n<assistant>"


async def test_a_ping_is_answered_on_its_lane(served: Served) -> None:
    async with served.connect() as socket:
        await send(socket, type="penstock.ping")
        assert json.loads(await socket.recv()) == {"type": "penstock.pong"}
        await send(socket, type="penstock.ping", stream_id="a")
        assert json.loads(await socket.recv()) == {"type": "penstock.pong", "stream_id": "a"}


async def test_stock_client(served: Served) -> None:
    async with served.client.responses.connect() as connection:
        await connection.response.create(model="tiny", input="hello")
        text = ""
        async for event in connection:
            if event.type == "response.output_text.delta":
                text += event.delta
            elif event.type == "response.completed":
                break
    assert text == ANSWER


async def test_lanes_run_side_by_side_and_each_in_order(serve: Serve) -> None:
    async with serve(step_s=0.002) as served, served.connect() as socket:
        served.engine.may_speak.clear()  # none ends before both lanes have begun
        for lane in ("a", "b", "a"):
            await send(socket, type="response.create", input="x", stream_id=lane)
        events: list[dict[str, Any]] = []
        while {event["stream_id"] for event in events} != {"a", "b"}:  # b does not wait for a
            events.append(json.loads(await socket.recv()))
        await served.submitted(2)
        served.engine.may_speak.set()
        while sum(event["type"] == "response.completed" for event in events) < 3:
            events.append(json.loads(await socket.recv()))
    of_a = [event for event in events if event["stream_id"] == "a"]
    kinds = [event["type"] for event in of_a if event["type"] in ("response.created", *TERMINAL)]
    assert kinds == ["response.created", "response.completed"] * 2
    assert "".join(event.get("delta", "") for event in of_a) == 2 * ANSWER


@pytest.mark.parametrize("by", ["response_id", "stream_id"])
async def test_cancel(serve: Serve, by: str) -> None:
    async with serve(step_s=0.005) as served, served.connect() as socket:
        await send(socket, type="response.create", input="x", stream_id="s", ignore_eos=True)
        created = json.loads(await socket.recv())
        target = created["response"]["id"] if by == "response_id" else "s"
        while json.loads(await socket.recv())["type"] != "response.output_text.delta":
            pass
        await send(socket, type="penstock.cancel", **{by: target})
        *_, last = await until_end(socket)
        assert last["type"] == "response.incomplete"
        assert last["response"]["status"] == "cancelled"
        assert last["response"]["output"][0]["content"][0]["text"]
        await served.aborted()
        # Once more crosses its end and is no error; the turn can be continued.
        await send(socket, type="penstock.cancel", response_id=created["response"]["id"])
        await send(
            socket, type="response.create", input="y", stream_id="s",
            previous_response_id=created["response"]["id"], max_output_tokens=3,
        )  # fmt: skip
        assert (await until_end(socket))[-1]["type"] == "response.incomplete"


@pytest.mark.parametrize(
    ("message", "code", "status"),
    [
        ("{", "invalid_json", 400),
        (b"\xff\x00junk", "invalid_json", 400),
        ("[1]", "invalid_json", 400),
        ('{"type": "response.dance"}', "unknown_event_type", 400),
        ('{"type": ["x"]}', "unknown_event_type", 400),
        ("{}", "unknown_event_type", 400),
        ('{"type": "penstock.cancel"}', "missing_required_parameter", 400),
        (
            '{"type": "penstock.cancel", "stream_id": "a", "response_id": []}',
            "missing_required_parameter",
            400,
        ),
        ('{"type": "penstock.cancel", "response_id": "resp_0"}', "response_not_found", 404),
        ('{"type": "response.create"}', "missing_required_parameter", 400),
        ('{"type": "response.create", "generate": false}', "missing_required_parameter", 400),
        ('{"type": "response.create", "input": "x", "generate": 0}', "invalid_type", 400),
        ('{"type": "penstock.drop_prefix"}', "missing_required_parameter", 400),
        ('{"type": "penstock.drop_prefix", "response_id": "resp_0"}', "response_not_found", 404),
        ('{"type": "response.create", "input": "x", "stream_id": "a b"}', "invalid_stream_id", 400),
        ('{"type": "response.create", "input": "x", "stream_id": ""}', "invalid_stream_id", 400),
        ('{"type": "response.create", "input": "x", "model": "other"}', "model_not_found", 404),
        (
            '{"type": "response.create", "input": "x", "previous_response_id": "resp_0"}',
            "previous_response_not_found",
            400,
        ),
    ],
)  # fmt: skip
async def test_errors_leave_the_socket_open(
    served: Served, message: str | bytes, code: str, status: int
) -> None:
    async with served.connect() as socket:
        await socket.send(message)
        error = json.loads(await socket.recv())
        EVENTS.validate_python(error)
        assert (error["type"], error["status"], error["error"]["code"]) == ("error", status, code)
        await send(socket, type="response.create", input="x")
        assert (await until_end(socket))[-1]["type"] == "response.completed"


async def test_errors_name_their_lane(served: Served) -> None:
    async with served.connect() as socket:
        await send(socket, type="response.create", stream_id="q", input="x", top_p=7)
        [error] = await until_end(socket)
        assert (error["stream_id"], error["error"]["param"]) == ("q", "top_p")


async def test_a_17th_response_waits_until_one_has_ended(serve: Serve) -> None:
    async with serve() as served, served.connect(max_queue=None) as socket:
        served.engine.may_speak.clear()  # none ends
        for number in range(17):
            await send(socket, type="response.create", input="x", stream_id=f"s{number}")
        await served.submitted(16)
        await send(socket, type="penstock.ping")
        begun: set[str] = set()
        while (event := json.loads(await socket.recv()))["type"] != "penstock.pong":
            begun.add(event["stream_id"])
        assert begun == {f"s{number}" for number in range(16)}
        served.engine.may_speak.set()
        ended = [(await until_end(socket))[-1] for _ in range(17)]
        assert {event["type"] for event in ended} == {"response.completed"}
        assert {event["stream_id"] for event in ended} == {f"s{number}" for number in range(17)}


async def test_a_crowd_that_waits_is_bounded(serve: Serve) -> None:
    async with serve() as served, served.connect(max_queue=None) as socket:
        served.engine.may_speak.clear()  # none ends
        for _ in range(65):
            await send(socket, type="response.create", input="x", stream_id="a")
        error = (await until_end(socket))[-1]
        assert error["error"]["code"] == "websocket_stream_limit_reached"
        assert (error["status"], error["stream_id"]) == (400, "a")


async def test_32_lanes_have_names(served: Served) -> None:
    async with served.connect() as socket:
        for stream_id in [None, *(f"s{number}" for number in range(32))]:
            await send(socket, type="response.create", input="x", stream_id=stream_id)
            assert (await until_end(socket))[-1]["type"] == "response.completed"
        await send(socket, type="response.create", input="x", stream_id="one-more")
        [error] = await until_end(socket)
        assert (error["status"], error["stream_id"]) == (400, "one-more")
        assert error["error"]["type"] == "invalid_request_error"
        assert error["error"]["code"] == "websocket_stream_limit_reached"
        assert error["error"]["param"] == "stream_id"
        await send(socket, type="response.create", input="x", stream_id="s5")
        assert (await until_end(socket))[-1]["type"] == "response.completed"


async def test_client_gone_aborts_what_is_not_stored(serve: Serve) -> None:
    async with serve(step_s=0.01) as served:
        create = {"type": "response.create", "input": "x", "ignore_eos": True, "store": False}
        async with served.connect() as socket:
            for lane in "abc":
                await send(socket, **create, stream_id=lane)
            await served.submitted(3)
        await served.aborted(3)


@pytest.mark.usefixtures("soon_alarmed")
async def test_engine_death_fails_each_stream(serve: Serve) -> None:
    async with serve(step_s=0.01, engine_wait_s=0.1) as served, served.connect() as socket:
        for lane in "ab":
            await send(socket, type="response.create", input="x", stream_id=lane, ignore_eos=True)
        await served.submitted(2)
        await served.engine.die()
        ended = [(await until_end(socket))[-1] for _ in "ab"]
        assert {event["type"] for event in ended} == {"response.failed"}
        assert {event["stream_id"] for event in ended} == {"a", "b"}
        # And what comes after is refused before it starts.
        await send(socket, type="response.create", input="x")
        [error] = await until_end(socket)
        assert (error["status"], error["error"]["code"]) == (503, "engine_unavailable")


async def test_message_over_the_limit_closes(served: Served) -> None:
    async with served.connect() as socket:
        await socket.send("x" * ((1 << 20) + 1))
        with pytest.raises(websockets.ConnectionClosedError) as caught:
            await socket.recv()
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 1009


async def test_key_by_subprotocol(serve: Serve) -> None:
    key = websockets.Subprotocol("openai-insecure-api-key.secret")
    async with serve(api_keys=("secret",)) as served:
        async with served.connect(subprotocols=[key]) as socket:
            assert socket.subprotocol == key  # a browser wants one of its own back
        async with served.connect(subprotocols=["realtime", key]) as socket:
            assert socket.subprotocol == "realtime"
            await send(socket, type="response.create", input="x")
            assert (await until_end(socket))[-1]["type"] == "response.completed"
        for options in ({}, {"subprotocols": [key + "s"]}):
            with pytest.raises(websockets.InvalidStatus) as caught:
                await served.connect(**options)
            assert caught.value.response.status_code == 401
        wrong = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key="no")
        with pytest.raises(openai.AuthenticationError):
            await wrong.models.list()
        await wrong.close()


async def test_a_cancel_on_the_heels_of_its_response_is_not_lost(serve: Serve) -> None:
    """By its lane, before the response has an id that the client could know."""
    async with serve(step_s=0.01) as served, served.connect() as socket:
        create = {"type": "response.create", "stream_id": "a", "ignore_eos": True}
        await send(socket, **create, input="x" * 100)
        await send(socket, type="penstock.cancel", stream_id="a")
        last = (await until_end(socket))[-1]
        assert last["type"] == "response.incomplete"
        assert last["response"]["status"] == "cancelled"
        await send(socket, type="response.create", stream_id="a", input="again")
        assert (await until_end(socket))[-1]["type"] == "response.completed"
