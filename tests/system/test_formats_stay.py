"""What an earlier version left in Redis is read, replayed and continued by this one.

`data/written_by_83f2e9f.json` holds what the gateway of commit 83f2e9f wrote (each key as `DUMP`
gives it) and what its clients saw, with today's built-in model in fp32 at temperature 0. Its
processes were killed while the last stream ran. `tests.support.left_in_redis` made it.
"""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import redis

from penstock.gateway.storage.conversations.turn_codec import TreeNode, pack, unpack
from penstock.gateway.storage.response_log.codec import (
    decode_delta,
    decode_end,
    decode_header,
    encode_delta,
    encode_end,
    encode_header,
)
from tests.redis_server import RedisServer

from .processes import END_S, serve

pytestmark = pytest.mark.redis

_FILE = Path(__file__).with_name("data") / "written_by_83f2e9f.json"
_NODE = TreeNode(
    turn_id="resp_1",
    conversation_id="conv_1",
    tenant="default",
    parent_id=None,
    status="completed",
    created_at=1,
)
_FIELDS = {"model": "demo", "temperature": 0}


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    """What clients of the earlier version saw."""
    return json.loads(_FILE.read_text())["seen"]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def client(
    long_model: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    """Of this version's server, on a Redis with the earlier version's keys."""
    path = tmp_path_factory.mktemp("formats")
    with RedisServer(path / "redis") as server:
        with redis.Redis.from_url(server.url) as database:
            for key, dump in json.loads(_FILE.read_text())["redis"].items():
                database.restore(key, 0, base64.b64decode(dump))
        flags = ("--dtype", "float32", "--redis-url", server.patient_url)
        with (
            serve(*long_model, *flags, log=path / "log") as served,
            httpx.Client(base_url=served.base_url, timeout=END_S) as client,
        ):
            yield client


def test_the_earlier_version_can_read_what_this_one_writes(tmp_path: Path) -> None:
    """Gateways of both run side by side during a rolling restart: of its responses, this version
    writes the same bytes, but for `deadline_s` of requests, which was null and is not written any
    more."""
    readers: dict[bytes, Callable[[bytes], bytes]] = {
        b"h": lambda data: encode_header(decode_header(data)),
        b"d": lambda data: encode_delta(decode_delta(data)),
        b"e": lambda data: encode_end(decode_end(data)),
    }
    kinds = Counter[bytes]()
    with RedisServer(tmp_path) as server, redis.Redis.from_url(server.url) as database:
        for key, dump in json.loads(_FILE.read_text())["redis"].items():
            database.restore(key, 0, base64.b64decode(dump))
        for key in database.keys("penstock:log:*"):
            for _, fields in database.xrange(key):
                for kind, data in fields.items():
                    written = msgspec.msgpack.decode(readers[kind](data))
                    assert written == _without_deadline(msgspec.msgpack.decode(data))
                    kinds[kind] += 1
        for key in database.keys("penstock:*:turns"):
            for body in database.hvals(key):
                assert pack(unpack(_NODE, body, {})).body == body
                kinds[b"turn"] += 1
    assert set(kinds) == {*readers, b"turn"}


def _without_deadline(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: _without_deadline(each) for name, each in value.items() if name != "deadline_s"
        }
    return [_without_deadline(each) for each in value] if isinstance(value, list) else value


def _get(client: httpx.Client, path: str) -> Any:
    answer = client.get(path)
    assert answer.status_code == 200, answer.text
    return answer.json()


def _resumed(client: httpx.Client, response_id: str, after: int) -> list[dict[str, Any]]:
    params = {"stream": "true", "starting_after": str(after)}
    answer = client.get(f"/v1/responses/{response_id}", params=params)
    assert answer.status_code == 200, answer.text
    lines = (line.removeprefix("data: ") for line in answer.text.splitlines() if "data: " in line)
    return [json.loads(line) for line in lines if line != "[DONE]"]


def _text(response: dict[str, Any]) -> str:
    return response["output"][0]["content"][0]["text"]  # type: ignore[no-any-return]


def test_responses_and_conversations_are_read(client: httpx.Client, seen: dict[str, Any]) -> None:
    for response in [*seen["turns"], seen["background"]]:
        assert _get(client, f"/v1/responses/{response['id']}") == response
    path = f"/v1/conversations/{seen['conversation']['id']}"
    found = _get(client, path)  # later versions say more
    assert found | seen["conversation"] == found
    assert _get(client, f"{path}/items") == seen["items"]


def test_an_ended_stream_replays_from_any_event(client: httpx.Client, seen: dict[str, Any]) -> None:
    events = seen["complete_events"]
    for event in events[:-1]:
        number = event["sequence_number"]
        rest = _resumed(client, events[0]["response"]["id"], number)
        rest[-1]["response"].pop("penstock")  # what later versions count
        assert rest == events[number + 1 :]


def _told(event: str) -> Any:
    """What a chunk tells: later versions have null fields of thoughts, too, and a fingerprint."""
    if event == "[DONE]":
        return event
    chunk = json.loads(event)
    for choice in chunk["choices"]:
        choice["delta"] = {name: value for name, value in choice["delta"].items() if value}
    return chunk | {"system_fingerprint": None}


def test_an_idempotent_chat_replays(client: httpx.Client, seen: dict[str, Any]) -> None:
    body = {**_FIELDS, "messages": [{"role": "user", "content": "Once."}]}
    body |= {"stream": True, "max_tokens": 24}
    headers = {"Idempotency-Key": "old-key"}
    answer = client.post("/v1/chat/completions", json=body, headers=headers)
    lines = [line for line in answer.text.splitlines() if line.startswith("data: ")]
    events = [line.removeprefix("data: ") for line in lines]
    assert list(map(_told, events)) == list(map(_told, seen["chat_events"]))


def test_a_stream_that_was_cut_goes_on(client: httpx.Client, seen: dict[str, Any]) -> None:
    events = seen["cut_events"]
    rest = _resumed(client, events[0]["response"]["id"], events[-1]["sequence_number"])
    every = events + rest
    assert [event["sequence_number"] for event in every] == list(range(len(every)))
    deltas = [event for event in every if event["type"] == "response.output_text.delta"]
    assert "".join(event["delta"] for event in deltas) == seen["whole_text"]
    assert rest[-1]["type"] == "response.incomplete"  # of max_output_tokens
    assert _text(rest[-1]["response"]) == seen["whole_text"]
    assert rest[-1]["response"]["usage"]["output_tokens"] == seen["whole_usage"]["output_tokens"]


def test_conversations_continue(client: httpx.Client, seen: dict[str, Any]) -> None:
    """Each branch has the same history: the next answer, and what it was computed from, agree."""
    _, main, branch = seen["turns"]
    for before, expected in zip((main, branch), seen["continued"], strict=True):
        body = {**_FIELDS, "input": "The third turn.", "max_output_tokens": 24}
        answer = client.post("/v1/responses", json={**body, "previous_response_id": before["id"]})
        assert answer.status_code == 200, answer.text
        assert _text(answer.json()) == _text(expected)
        assert answer.json()["usage"]["input_tokens"] == expected["usage"]["input_tokens"]
