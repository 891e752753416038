"""Sessions as two gateways of one server see them: stops, cancels, races for a head, branches."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import openai
import pytest
import websockets

from tests.redis_server import RedisServer

from .processes import END_S, ENDLESS_TOKENS, Served, idle, metrics, serve

pytestmark = pytest.mark.redis

_IN_USE = ("num_requests_running", "kv_cache_usage_perc")
_STORY = {"model": "demo", "input": "Tell me a story."}
_ENDLESS = {**_STORY, "ignore_eos": True, "max_output_tokens": ENDLESS_TOKENS}


@pytest.fixture(scope="module")
def two(
    long_model: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Served, Served]]:
    """Two servers of one Redis."""
    path = tmp_path_factory.mktemp("two")
    with (
        RedisServer(path / "redis") as redis,
        serve(*long_model, "--redis-url", redis.patient_url, log=path / "first") as first,
        serve(*long_model, "--redis-url", redis.patient_url, log=path / "second") as second,
    ):
        yield first, second


@pytest.fixture
async def first(two: tuple[Served, Served]) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=two[0].base_url, timeout=60) as client:
        yield client


@pytest.fixture
async def second(two: tuple[Served, Served]) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=two[1].base_url, timeout=60) as client:
        yield client


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    assert response.status_code == 200, await response.aread()
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


@pytest.mark.parametrize("by", ["post", "socket"])
@pytest.mark.parametrize("where", ["same", "other"])
@pytest.mark.exhaustive
async def test_a_cancel_frees_the_blocks(
    by: str, where: str, first: httpx.AsyncClient, second: httpx.AsyncClient
) -> None:
    """From whichever gateway it comes; and the stream ends as cancelled."""
    canceller = first if where == "same" else second
    body = {**_ENDLESS, "stream": True}
    async with first.stream("POST", "/v1/responses", json=body) as response:
        events = _events(response)
        seen = [await anext(events) for _ in range(20)]
        response_id = seen[0]["response"]["id"]
        async with asyncio.timeout(END_S):
            while not all(await metrics(first, *_IN_USE)):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        if by == "post":
            cancelled = await canceller.post(f"/v1/responses/{response_id}/cancel")
            assert cancelled.status_code == 200, cancelled.text
            assert cancelled.json()["status"] == "cancelled"
        else:
            address = str(canceller.base_url.copy_with(scheme="ws", path="/v1/responses"))
            async with websockets.connect(address, open_timeout=END_S) as socket:
                cancel = {"type": "penstock.cancel", "response_id": response_id}
                await socket.send(json.dumps(cancel))
                seen += [event async for event in events]
        await idle(first)  # though the answer does not end of itself
        seen += [event async for event in events]
    assert [event["sequence_number"] for event in seen] == list(range(len(seen)))
    assert seen[-1]["type"] == "response.incomplete"
    assert seen[-1]["response"]["status"] == "cancelled"
    assert seen[-1]["response"]["usage"]["output_tokens"] < _ENDLESS["max_output_tokens"]


async def test_a_stop_string_frees_the_blocks(first: httpx.AsyncClient) -> None:
    chat = {"model": "demo", "messages": [{"role": "user", "content": "Tell me a story."}]}
    endless = {"max_tokens": ENDLESS_TOKENS, "ignore_eos": True, "stop": [" "]}
    answer = await first.post("/v1/chat/completions", json={**chat, **endless})
    assert answer.status_code == 200, answer.text
    await idle(first)


async def test_of_two_turns_raced_on_a_head_one_wins(
    two: tuple[Served, Served], first: httpx.AsyncClient
) -> None:
    """The other gets 409, which the stock client does not retry. The winner ends when told to."""
    conversation = (await first.post("/v1/conversations", json={})).json()["id"]
    posts: list[httpx.Request] = []

    async def note(request: httpx.Request) -> None:
        posts.append(request)

    async with (
        httpx.AsyncClient(event_hooks={"request": [note]}, timeout=END_S) as http,
        openai.AsyncOpenAI(
            base_url=f"{two[0].base_url}/v1", api_key="none", http_client=http
        ) as one,
        openai.AsyncOpenAI(
            base_url=f"{two[1].base_url}/v1", api_key="none", http_client=http
        ) as other,
    ):
        ends = await asyncio.gather(
            *(
                client.responses.create(
                    model="demo",
                    input=f"Hello {number}",
                    conversation=conversation,
                    background=True,
                    max_output_tokens=ENDLESS_TOKENS,
                    extra_body={"ignore_eos": True},
                )
                for number, client in enumerate((one, other))
            ),
            return_exceptions=True,
        )
    lost = [end for end in ends if isinstance(end, openai.ConflictError)]
    won = [end for end in ends if not isinstance(end, BaseException)]
    assert (len(lost), len(won)) == (1, 1), ends
    assert lost[0].code == "conversation_locked"
    assert lost[0].response.headers["x-should-retry"] == "false"
    assert len(posts) == 2
    cancelled = await first.post(f"/v1/responses/{won[0].id}/cancel")
    assert cancelled.json()["status"] == "cancelled", cancelled.text
    tree = (await first.get(f"/v1/conversations/{conversation}/tree")).json()
    assert [turn["response_id"] for turn in tree["data"]] == [won[0].id]


async def test_turns_raced_on_one_response_are_siblings(
    first: httpx.AsyncClient, second: httpx.AsyncClient
) -> None:
    root = (await first.post("/v1/responses", json={**_STORY, "max_output_tokens": 8})).json()
    body = {**_STORY, "max_output_tokens": 30, "previous_response_id": root["id"]}
    turns = await asyncio.gather(
        *(client.post("/v1/responses", json=body) for client in (first, second))
    )
    assert [turn.status_code for turn in turns] == [200, 200]
    ids = {turn.json()["id"] for turn in turns}
    assert len(ids) == 2
    assert {turn.json()["previous_response_id"] for turn in turns} == {root["id"]}
    for response_id in ids:  # each can be continued, on either
        again = {**body, "previous_response_id": response_id}
        assert (await second.post("/v1/responses", json=again)).status_code == 200


async def test_a_branch_from_an_older_turn_finds_the_shared_prefix(
    first: httpx.AsyncClient,
) -> None:
    async def turn(text: str, previous: dict[str, Any] | None) -> dict[str, Any]:
        body = {"model": "demo", "input": text, "max_output_tokens": 40, "cache_salt": "branches"}
        if previous is not None:
            body["previous_response_id"] = previous["id"]
        answer = await first.post("/v1/responses", json=body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    root = await turn("Tell me a story about a fox and a clock, please.", None)
    await turn("And then?", root)
    branch = await turn("How did it begin?", root)
    known = root["usage"]["total_tokens"]
    cached = branch["usage"]["input_tokens_details"]["cached_tokens"]
    # All that was computed of the shared turn; the questions may begin alike, too.
    assert known - 1 <= cached < branch["usage"]["input_tokens"]
