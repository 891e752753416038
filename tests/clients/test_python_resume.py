"""The Python client against the real server, over connections that are cut at every event."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from penstock.clients import (
    AsyncClient,
    Client,
    ConnectionLostError,
    InvalidRequestError,
    ProtocolError,
    ResponseExpiredError,
    RetryPolicy,
    output_text,
)
from penstock.clients.python.event_stream import EventStream

from ..system.processes import END_S, Served, wait_until
from .cutting_proxy import CuttingProxy

ASKED: dict[str, Any] = {"model": "demo", "input": "What is paged attention?", "temperature": 0}
FEW = ASKED | {"max_output_tokens": 12}
HASTY = RetryPolicy(max_resumes=2, first_wait_s=0.01)


@pytest.fixture(scope="module")
def whole(demo_server: Served) -> str:
    """The undisturbed answer."""
    with Client(demo_server.base_url) as client:
        return output_text(client.responses.create(**FEW))


def check(events: list[Any], whole: str) -> None:
    """No gap, no repeat, one terminal event, and the same text twice."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    ends = [event["type"] for event in events if "usage" in event.get("response", {})]
    assert events[-1]["type"] == "response.incomplete"
    assert "response.incomplete" not in ends[:-1]
    deltas = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
    assert "".join(deltas) == output_text(events[-1]["response"]) == whole


@pytest.mark.parametrize("wire", ["sse", "websocket"])
def test_sync_with_a_cut_at_every_event(demo_server: Served, whole: str, wire: str) -> None:
    with CuttingProxy(demo_server.base_url, 0, 1) as proxy, Client(proxy.url) as client:
        if wire == "sse":
            with client.responses.stream(**FEW) as stream:
                events = list(stream)
        else:
            with client.connect() as socket, socket.create(**FEW) as stream:
                events = list(stream)
    check(events, whole)
    assert stream.text == whole
    assert proxy.num_cut >= len(events)


@pytest.mark.parametrize("wire", ["sse", "websocket"])
async def test_async_with_a_cut_at_every_event(demo_server: Served, whole: str, wire: str) -> None:
    with CuttingProxy(demo_server.base_url, 0, 1) as proxy:
        async with AsyncClient(proxy.url) as client:
            if wire == "sse":
                async with client.responses.stream(**FEW) as stream:
                    events = [event async for event in stream]
            else:
                async with client.connect() as socket, await socket.create(**FEW) as stream:
                    events = [event async for event in stream]
    check(events, whole)
    assert proxy.num_cut >= len(events)


async def test_many_on_one_socket_that_is_cut_again_and_again(
    demo_server: Served, whole: str
) -> None:
    async def read(stream: EventStream[Any]) -> list[Any]:
        return [event async for event in stream]

    with CuttingProxy(demo_server.base_url, 7) as proxy:
        async with AsyncClient(proxy.url) as client, client.connect() as socket:
            streams = [await socket.create(**FEW) for _ in range(6)]
            told = await asyncio.gather(*map(read, streams))
    for events in told:
        check(events, whole)
    assert proxy.num_cut >= sum(map(len, told)) // 7


def test_those_that_nobody_reads_are_resumed_too(demo_server: Served, whole: str) -> None:
    """One thread reads one after the other, over connections that all of them share."""
    with (
        CuttingProxy(demo_server.base_url, 5, 5, 5, None) as proxy,
        # Each cut may come before a stream's first event: one more than there are by default.
        Client(proxy.url, retries=RetryPolicy(max_retries=3)) as client,
        client.connect() as socket,
    ):
        streams = [socket.create(**FEW) for _ in range(4)]
        for stream in reversed(streams):
            check(list(stream), whole)


def test_a_stream_that_is_followed_from_a_number(demo_server: Served) -> None:
    with Client(demo_server.base_url) as client:
        events: list[Any] = list(client.responses.stream(**FEW))
        response_id = events[0]["response"]["id"]
        assert list(client.responses.follow(response_id, starting_after=4)) == events[5:]
        with client.connect() as socket:
            rest: list[Any] = list(socket.follow(response_id, starting_after=7))
        assert [{**event, "stream_id": None} for event in events[8:]] == [
            {**event, "stream_id": None} for event in rest
        ]


@pytest.mark.parametrize("wire", ["sse", "websocket"])
def test_what_is_not_kept_any_more(demo_server: Served, wire: str) -> None:
    with Client(demo_server.base_url) as client, client.connect() as socket:
        follow = client.responses.follow if wire == "sse" else socket.follow
        stream = follow("resp_gone", starting_after=3)
        with pytest.raises(ResponseExpiredError) as caught:
            stream.final()
    assert caught.value.code == "response_expired"


def test_what_is_not_stored_cannot_be_resumed(demo_server: Served) -> None:
    with (
        CuttingProxy(demo_server.base_url, 3) as proxy,
        Client(proxy.url, retries=HASTY) as client,
        client.responses.stream(**FEW, store=False) as stream,
        pytest.raises(ConnectionLostError),
    ):
        stream.final()


def test_a_turn_of_a_conversation_is_never_asked_for_twice(demo_server: Served) -> None:
    """Whether it arrived is unclear where not even its id came back."""
    with Client(demo_server.base_url) as direct:
        conversation = direct.conversations.create()["id"]
        with (
            CuttingProxy(demo_server.base_url, 0, None) as proxy,
            Client(proxy.url) as client,
            pytest.raises(ConnectionLostError),
        ):
            client.responses.stream(**FEW, conversation=conversation).final()
        assert len(direct.conversations.tree(conversation)["data"]) == 1


def test_a_server_that_stays_away(demo_server: Served) -> None:
    waits: list[float] = []
    policy = RetryPolicy(
        max_resumes=3, first_wait_s=0.01, on_wait=lambda _, wait_s: waits.append(wait_s)
    )
    with (
        CuttingProxy(demo_server.base_url, 3) as proxy,
        Client(proxy.url, retries=policy) as client,
        client.responses.stream(**FEW) as stream,
    ):
        assert next(stream)["type"] == "response.created"
        proxy.refuse()
        with pytest.raises(Exception, match="cannot reach") as caught:
            list(stream)
        assert stream.last_number == 2
        assert list(stream) == []
    assert waits[0] == 0.0
    assert len(waits) == 3
    response_id = stream.response_id
    assert response_id is not None
    with Client(demo_server.base_url) as client:  # the answer is not lost
        numbers = [event["sequence_number"] for event in client.responses.follow(response_id)]
    assert numbers == list(range(len(numbers)))
    assert not isinstance(caught.value, ProtocolError)


async def test_a_task_that_is_cancelled_in_the_middle_loses_nothing(
    demo_server: Served, whole: str
) -> None:
    async with AsyncClient(demo_server.base_url) as client, client.connect() as socket:
        for stream in (client.responses.stream(**FEW), await socket.create(**FEW)):
            events: list[Any] = []
            patience_s = 0.004
            while True:
                try:
                    async with asyncio.timeout(patience_s):
                        events.append(await anext(stream))
                    patience_s = 0.004
                except TimeoutError:
                    patience_s *= 1.2  # a slow machine may need more to connect
                    continue
                except StopAsyncIteration:
                    break
            check(events, whole)


def test_a_lost_answer_is_not_computed_again(demo_server: Served) -> None:
    """Of a chat completion; the connection breaks where the answer's body begins."""
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi!"}], "ignore_eos": True}
    with httpx.Client(base_url=demo_server.base_url, timeout=END_S) as http:
        wait_until(lambda: counted(http, "num_requests_running") == 0)
        before = counted(http, "engine_generation_tokens_total")
        with (
            CuttingProxy(demo_server.base_url, 0, None) as proxy,
            Client(proxy.url, retries=RetryPolicy(first_wait_s=0.01)) as client,
        ):
            answer = client.chat.create(model="demo", max_tokens=24, **asked)
        assert proxy.num_cut == 1
        assert answer["usage"]["completion_tokens"] == 24
        # What the engine has told by now is all that it did.
        assert counted(http, "engine_generation_tokens_total") == before + 24


def counted(http: httpx.Client, name: str) -> float:
    lines = http.get("/metrics").text.splitlines()
    line = next(line for line in lines if line.startswith(f"penstock:{name}{{"))
    return float(line.rpartition(" ")[2])


@pytest.mark.parametrize("wire", ["sse", "websocket"])
def test_following_from_an_event_that_never_was(demo_server: Served, wire: str) -> None:
    with Client(demo_server.base_url) as client, client.connect() as socket:
        response = client.responses.create(**FEW)
        follow = client.responses.follow if wire == "sse" else socket.follow
        for after in (10_000, -2):
            with pytest.raises(InvalidRequestError) as caught:
                follow(response["id"], starting_after=after).final()
            assert (caught.value.status, caught.value.param) == (400, "starting_after")
