"""The Python client's operations against the real server, sync and async."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from penstock.clients import (
    AsyncClient,
    Client,
    ConflictError,
    ConnectionLostError,
    InvalidRequestError,
    NotFoundError,
    RetryPolicy,
    UnreachableError,
    output_text,
)

from ..system.processes import Served
from .cutting_proxy import CuttingProxy

ASKED: dict[str, Any] = {"model": "demo", "input": "Count to 5.", "temperature": 0}
ENDLESS: dict[str, Any] = {"model": "demo", "input": "Go on.", "ignore_eos": True}
MESSAGES: list[Any] = [{"role": "user", "content": "Count to 5."}]


@pytest.fixture
def client(demo_server: Served) -> Any:
    with Client(demo_server.base_url) as made:
        yield made


def test_models(client: Client) -> None:
    assert [model["id"] for model in client.models.list()["data"]] == ["demo"]
    assert client.models.retrieve("demo")["owned_by"] == "penstock"
    with pytest.raises(NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.status == 404


def test_embeddings_and_scores(client: Client) -> None:
    texts = ["Hello there", "A banana"]
    answer = client.embeddings.create(model="demo", input=texts)
    short = client.embeddings.create(model="demo", input=texts[0], dimensions=4)
    assert [len(each["embedding"]) for each in (*answer["data"], *short["data"])] == [256, 256, 4]
    ranking = client.embeddings.rerank(model="demo", query="Hello", documents=texts)
    scores = client.embeddings.score(model="demo", queries="Hello", documents=texts)
    ranked = {each["index"]: each["relevance_score"] for each in ranking["results"]}
    assert [ranked[each["index"]] for each in scores["data"]] == [
        s["score"] for s in scores["data"]
    ]
    assert ranking["results"][0]["index"] == 0
    with pytest.raises(InvalidRequestError, match="dimensions"):
        client.embeddings.create(model="demo", input="x", dimensions=1000)


def test_chat_and_its_stream(client: Client) -> None:
    asked: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "temperature": 0}
    whole = client.chat.create(**asked)["choices"][0]["message"]["content"]
    with client.chat.stream(**asked) as stream:
        pieces = [chunk["choices"][0]["delta"].get("content") or "" for chunk in stream]
    assert "".join(pieces) == whole
    assert len(pieces) > 2


def test_a_chat_stream_that_breaks_says_so(demo_server: Served) -> None:
    with (
        CuttingProxy(demo_server.base_url, 0) as proxy,
        Client(proxy.url) as client,
        client.chat.stream(model="demo", messages=MESSAGES) as stream,
        pytest.raises(ConnectionLostError),
    ):
        list(stream)


def test_a_response_and_those_that_follow_it(client: Client) -> None:
    first = client.responses.create(model="demo", input="Hi, my name is Orlan.", temperature=0)
    with client.responses.stream(
        model="demo", input="What is my name?", previous_response_id=first["id"], temperature=0
    ) as stream:
        second = stream.final()
    assert "Orlan" in stream.text == output_text(second)
    assert client.responses.retrieve(second["id"]) == second
    page = client.responses.input_items(second["id"], limit=2, order="asc")
    assert page["data"][0]["content"][0]["text"] == "Hi, my name is Orlan."
    assert page["has_more"]
    assert client.responses.delete(second["id"])["deleted"]
    with pytest.raises(NotFoundError):
        client.responses.retrieve(second["id"])


def test_conversations(client: Client) -> None:
    made = client.conversations.create(
        items=[
            {"role": "user", "content": "Hi, my name is Velora."},
            {"role": "assistant", "content": "Nice to meet you, Velora!"},
        ],
        metadata={"title": "names"},
    )
    one = made["id"]
    assert client.conversations.list(limit=1)["data"][0]["id"] == one
    assert client.conversations.update(one, pinned=True)["pinned"]
    assert [each["id"] for each in client.conversations.list(pinned=True)["data"]] == [one]
    [hit] = client.conversations.search("nice velora", limit=1)["data"]
    [turn] = client.conversations.tree(one, items="all")["data"]
    assert (hit["conversation"]["id"], hit["turn"]) == (one, turn["turn"])
    assert turn["items"][0]["content"][0]["text"] == "Hi, my name is Velora."
    assert "items" not in client.conversations.tree(one)["data"][0]
    answer = client.responses.create(
        model="demo", input="What is my name?", conversation=one, temperature=0
    )
    assert "Velora" in output_text(answer)
    items = client.conversations.items.list(one, order="asc")["data"]
    assert [item["role"] for item in items] == ["user", "assistant"] * 2
    assert client.conversations.items.retrieve(one, items[0]["id"]) == items[0]
    added = client.conversations.items.create(one, items=[{"role": "user", "content": "Bye."}])
    client.conversations.items.delete(one, added["data"][0]["id"])
    assert client.conversations.update(one, metadata={"k": "v"})["metadata"] == {"k": "v"}
    assert client.conversations.retrieve(one)["metadata"] == {"k": "v"}
    with pytest.raises(ConflictError) as caught:
        client.conversations.set_head(one, turn["turn"], expected=turn["turn"])
    assert caught.value.code == "conversation_locked"
    head = client.conversations.tree(one)["head"]
    assert client.conversations.set_head(one, turn["turn"], expected=head)["turn"] == turn["turn"]
    assert client.conversations.delete_turn(one, turn["turn"])["id"] == one
    assert turn["turn"] not in [t["turn"] for t in client.conversations.tree(one)["data"]]
    assert client.conversations.delete(one)["deleted"]


async def test_the_same_on_asyncio(demo_server: Served) -> None:
    async with AsyncClient(demo_server.base_url) as client:
        assert (await client.models.list())["data"][0]["id"] == "demo"
        first = await client.responses.create(**ASKED)
        async with client.responses.stream(**ASKED) as stream:
            assert output_text(await stream.final()) == output_text(first)
        chunks = [c async for c in client.chat.stream(model="demo", messages=MESSAGES)]
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        conversation = await client.conversations.create()
        assert (await client.conversations.items.list(conversation["id"]))["data"] == []
        with pytest.raises(NotFoundError):
            await client.responses.retrieve("resp_nowhere")


async def test_sixteen_at_once_on_one_socket_and_others_wait(demo_server: Served) -> None:
    policy = RetryPolicy(max_retries=0)
    async with (
        AsyncClient(demo_server.base_url, retries=policy) as client,
        client.connect() as socket,
    ):
        streams = [await socket.create(**ENDLESS) for _ in range(16)]
        others = [asyncio.create_task(socket.create(**ASKED)) for _ in range(40)]
        await asyncio.wait(others[:16])  # at the server; the rest in the client
        await asyncio.gather(*(stream.cancel() for stream in streams))
        ended = await asyncio.gather(*(stream.final() for stream in streams))
        assert {response["status"] for response in ended} == {"cancelled"}
        for other in others:
            assert "5" in output_text(await (await other).final())


def test_streams_of_one_socket_in_threads_of_their_own(client: Client) -> None:
    texts: dict[int, str] = {}

    def read(number: int) -> None:
        texts[number] = output_text(socket.create(**ASKED).final())

    with client.connect() as socket:
        threads = [threading.Thread(target=read, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert len(texts) == 6
    assert len(set(texts.values())) == 1


@pytest.mark.parametrize("wire", ["sse", "websocket"])
@pytest.mark.parametrize("num_read", [0, 6])
def test_cancel(client: Client, wire: str, num_read: int) -> None:
    """Before anything was read, and in the middle; the terminal event comes in the end."""
    with client.connect() as socket:
        stream = client.responses.stream(**ENDLESS) if wire == "sse" else socket.create(**ENDLESS)
        for _ in range(num_read):
            next(stream)
        stream.cancel()
        assert stream.final()["status"] == "cancelled"
        stream.cancel()  # after the end: nothing
    assert stream.response_id is not None
    assert client.responses.retrieve(stream.response_id)["status"] == "cancelled"


def test_cancel_by_id_and_without_storage(client: Client) -> None:
    begun = client.responses.create(**ENDLESS, background=True)
    assert client.responses.cancel(begun["id"])["status"] == "cancelled"
    with client.responses.stream(**ENDLESS, store=False) as stream:
        next(stream)
        stream.cancel()
        assert list(stream) == []  # it ended with its connection
        assert stream.response is None


async def test_cancel_while_another_task_reads(demo_server: Served) -> None:
    async with AsyncClient(demo_server.base_url) as client, client.connect() as socket:
        stream = await socket.create(**ENDLESS)
        reading = asyncio.create_task(stream.final())
        await stream.cancel()
        assert (await reading)["status"] == "cancelled"
        # And while nothing comes: after its text this answer consists of ends of a message.
        silent = {**ENDLESS, "input": "Hi, my name is Orlan.", "max_output_tokens": 1_000}
        stream = await socket.create(**silent, temperature=0)
        reading = asyncio.create_task(stream.final())
        while not stream.text.endswith("Orlan!"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await stream.cancel()
        assert (await reading)["status"] == "cancelled"


def test_leaving_a_lane_in_the_middle_harms_no_other(client: Client) -> None:
    with client.connect() as socket:
        left = socket.create(**ENDLESS)
        next(left)
        left.close()
        assert list(left) == []
        assert "5" in output_text(socket.create(**ASKED).final())
        assert left.response_id is not None
        client.responses.cancel(left.response_id)


def test_what_cannot_be_sent_is_said_and_harms_no_other(client: Client) -> None:
    with client.connect() as socket:
        stream = socket.create(**ASKED)
        for parameters in ({"input": "\ud83d"}, {"temperature": float("nan")}):
            for create in (socket.create, client.responses.create):
                with pytest.raises(ValueError, match=r"surrogates|JSON"):
                    create(**ASKED | parameters)
        with pytest.raises(InvalidRequestError, match="larger") as caught:
            socket.create(model="demo", input="word " * 300_000)
        assert caught.value.status == 413
        assert "5" in output_text(stream.final())
    for response_id in ("", "..", "x/../y"):
        with pytest.raises(ValueError, match="id is missing"):
            client.responses.retrieve(response_id)
    with pytest.raises(NotFoundError, match="'a\\?b#ü'"):
        client.responses.retrieve("a?b#ü")
    with pytest.raises(ValueError, match="api_key"):
        Client("http://127.0.0.1:8000", api_key="clé")


def test_refusals_are_typed(client: Client) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        client.responses.create(model="demo", input="x", top_p=7)
    assert (caught.value.status, caught.value.param) == (400, "top_p")
    with client.connect() as socket:
        for stream in (
            client.responses.stream(**ASKED, previous_response_id="resp_nowhere"),
            socket.create(**ASKED, previous_response_id="resp_nowhere"),
        ):
            with pytest.raises(InvalidRequestError) as gone:
                stream.final()
            assert gone.value.code == "previous_response_not_found"
            assert list(stream) == []


def test_nobody_there() -> None:
    policy = RetryPolicy(max_retries=1, first_wait_s=0.01)
    with Client("http://127.0.0.1:1", retries=policy) as client, client.connect() as socket:
        for ask in (client.models.list, lambda: socket.create(**ASKED)):
            with pytest.raises(UnreachableError, match="is `penstock serve` running"):
                ask()
