"""Something else has written to a key in Redis that a gateway reads: only what the key belongs to
is refused, in one line, and everything else goes on."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import pytest
import redis

from penstock.gateway.storage.response_log.redis_settings import RedisLogSettings

from ...redis_server import RedisServer
from ..conftest import ANSWER, Serve, Served, until

pytestmark = pytest.mark.redis
_BODY = {"model": "tiny", "input": "hello"}
_MAX_LINE_CHARS = 2048
_UNREADABLE = (409, "stored_data_unreadable")
_EXPIRED = (404, "response_expired")


@dataclass
class Bed:
    """A gateway with a conversation of one response, and another one."""

    served: Served
    client: redis.Redis
    conversation_id: str
    response_id: str
    other_id: str

    @property
    def tree(self) -> str:
        return self.conversation_id.removeprefix("conv_")

    def key(self, name: str) -> str:
        return f"penstock:{{{self.tree}}}:{name}"

    @property
    def log_key(self) -> str:
        return f"penstock:log:{{{self.tree}}}:{self.response_id}"

    def change_version(self) -> None:
        """So that the gateway does not go by the tree that it knows."""
        with contextlib.suppress(redis.exceptions.ResponseError):  # a key of another type
            self.client.hincrby(self.key("conversation"), "version", 1)

    async def told(self, method: str, path: str, **options: Any) -> tuple[int, str | None]:
        """Status and code of an answer."""
        answer = await self.served.http.request(method, path, **options)
        body = answer.json()
        return answer.status_code, body["error"]["code"] if "error" in body else None

    async def is_well(self) -> None:
        """The other conversation can be used, and responses are stored and resumed."""
        told = await self.told("GET", f"/v1/conversations/{self.other_id}/items")
        assert told == (200, None)
        body = {**_BODY, "conversation": self.other_id}
        answer = await self.served.http.post("/v1/responses", json=body)
        assert answer.status_code == 200, answer.text
        path = f"/v1/responses/{answer.json()['id']}"
        again = await self.served.http.get(path, params={"stream": "true"})
        assert again.status_code == 200, again.text
        assert "response.completed" in again.text


@pytest.fixture
async def bed(
    serve: Serve, redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> AsyncIterator[Bed]:
    caplog.set_level(logging.INFO, "penstock")
    async with serve(redis_url=redis_server.patient_url) as served:
        with redis_server.client() as client:
            ids = [
                (await served.http.post("/v1/conversations", json={})).json()["id"]
                for _ in range(2)
            ]
            body = {**_BODY, "conversation": ids[0]}
            answer = await served.http.post("/v1/responses", json=body)
            assert answer.json()["output"][0]["content"][0]["text"] == ANSWER
            yield Bed(served, client, ids[0], answer.json()["id"], ids[1])


def _wrong_type(name: str) -> Callable[[Bed], None]:
    def write(bed: Bed) -> None:
        bed.client.set(bed.key(name), "of somebody else")

    return write


def _garbage(name: str, value: bytes) -> Callable[[Bed], None]:
    def write(bed: Bed) -> None:
        for field in bed.client.hkeys(bed.key(name)):
            bed.client.hset(bed.key(name), field, value)

    return write


def _metadata(bed: Bed) -> None:
    bed.client.hset(bed.key("conversation"), "metadata", b"\xc1\xff")


def _index(bed: Bed) -> str:
    (key,) = bed.client.keys("*:conversations")
    return str(key.decode())


def _wrong_index(bed: Bed) -> None:
    key = _index(bed)
    bed.client.set(key, "of somebody else")


def _garbage_in_index(bed: Bed) -> None:
    bed.client.zadd(_index(bed), {bytes([0xFF, number]): 2e9 for number in range(40)})


def _wrong_log(bed: Bed) -> None:
    bed.client.set(bed.log_key, "of somebody else")


def _garbage_log(bed: Bed) -> None:
    bed.client.delete(bed.log_key)
    bed.client.xadd(bed.log_key, {"h": b"\xc1\xff" * 5000}, id="1-1")


def _odd_entry(bed: Bed) -> None:
    bed.client.xadd(bed.log_key, {"d": b"x", "e": b"y"})


_CONVERSATION = "/v1/conversations/{conversation}"
_ITEMS = f"{_CONVERSATION}/items"
_TREE = f"{_CONVERSATION}/tree"
_RESPONSE = "/v1/responses/{response}"
_STREAM = f"{_RESPONSE}?stream=true"
Case = tuple[Callable[[Bed], None], str, tuple[int, str | None]]
CASES: dict[str, Case] = {
    "conversation": (_wrong_type("conversation"), f"GET {_CONVERSATION}", _UNREADABLE),
    "its items": (_wrong_type("conversation"), f"GET {_ITEMS}", _UNREADABLE),
    "its deletion": (_wrong_type("conversation"), f"DELETE {_CONVERSATION}", _UNREADABLE),
    "metadata": (_metadata, f"GET {_CONVERSATION}", _UNREADABLE),
    "links": (_wrong_type("links"), f"GET {_TREE}", _UNREADABLE),
    "a link": (_garbage("links", b"\xff"), f"GET {_TREE}", _UNREADABLE),
    "a link of a response": (_garbage("links", b"no link"), f"GET {_RESPONSE}", _UNREADABLE),
    "turns": (_wrong_type("turns"), f"GET {_RESPONSE}", _UNREADABLE),
    "a turn": (_garbage("turns", b"\x00"), f"GET {_RESPONSE}", _UNREADABLE),
    "a turn of many names": (_garbage("turns", b"\xff" * 40), f"GET {_ITEMS}", _UNREADABLE),
    "a turn without content": (_garbage("turns", bytes(4) + b"\x93"), f"GET {_ITEMS}", _UNREADABLE),
    "a turn that is dropped": (_garbage("turns", b"\xff" * 40), f"DELETE {_RESPONSE}", _UNREADABLE),
    "the list": (_wrong_index, "GET /v1/conversations", _UNREADABLE),
    "an id in the list": (_garbage_in_index, "GET /v1/conversations?limit=2", (200, None)),
    "without the list": (_wrong_index, "POST /v1/conversations", (200, None)),
    "a log": (_wrong_log, f"GET {_STREAM}", _EXPIRED),
    "a log's header": (_garbage_log, f"GET {_STREAM}", _EXPIRED),
    "a log's entry": (_odd_entry, f"GET {_STREAM}", _EXPIRED),
}


@pytest.mark.parametrize("case", CASES)
async def test_only_what_the_key_belongs_to_is_refused(
    case: str, bed: Bed, caplog: pytest.LogCaptureFixture
) -> None:
    write, request, expected = CASES[case]
    write(bed)
    bed.change_version()
    method, _, path = request.partition(" ")
    path = path.format(conversation=bed.conversation_id, response=bed.response_id)
    options = {"json": {}} if method == "POST" else {}
    for _ in range(3):
        assert await bed.told(method, path, **options) == expected
    await bed.is_well()
    _check_log(caplog, most=1)


async def test_a_conversation_cannot_go_on_from_it(bed: Bed) -> None:
    _wrong_type("links")(bed)
    body = {**_BODY, "conversation": bed.conversation_id}
    answer = await bed.served.http.post("/v1/responses", json=body)
    assert answer.status_code == 409
    assert answer.headers["x-should-retry"] == "false"
    error = answer.json()["error"]
    assert error["message"] == (
        "this conversation cannot be read: something else has written to its keys in Redis"
    )


@pytest.mark.parametrize(
    "key",
    ["penstock:gateways", "penstock:control:", "penstock:owned:", "penstock:lease:", "a member"],
)
async def test_gateways_go_on_without_what_they_share(
    key: str,
    serve: Serve,
    patient_logs: RedisLogSettings,
    redis_server: RedisServer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The keys by which they know of each other."""
    patient_logs.beat_s = 0.02
    async with serve(redis_url=redis_server.patient_url) as served:
        with redis_server.client() as client:
            (gateway,) = client.smembers("penstock:gateways")
            if key == "a member":
                client.sadd("penstock:gateways", b"\xff", "nobody", "{x}")
                client.sadd("penstock:owned:nobody", b"\xff", "x resp_1", "1 nonsense")
                client.set("penstock:owned:{x}", "of somebody else")
            elif key.endswith(":"):
                name = key + gateway.decode()
                client.delete(name)
                client.rpush(name, "of somebody else")
            else:
                client.delete(key)
                client.set(key, "of somebody else")
            num_before = _num_commands(client)
            await until(lambda: _num_commands(client) > num_before + 60)  # several heartbeats
            chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
            answer = await served.http.post("/v1/chat/completions", json=chat)
            assert answer.status_code == 200
            answer = await served.http.post("/v1/responses", json=_BODY)
            expected = 409 if key == "penstock:owned:" else 200
            assert answer.status_code == expected, answer.text
    _check_log(caplog, most=3)


def _num_commands(client: redis.Redis) -> int:
    return int(client.info("stats")["total_commands_processed"])


async def test_a_log_that_is_overwritten_while_it_is_followed(
    serve: Serve, redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """It fails for its reader; other logs are still followed."""
    async with serve(step_s=0.05, redis_url=redis_server.patient_url) as served:
        body = {**_BODY, "stream": True}
        async with served.http.stream("POST", "/v1/responses", json=body) as response:
            lines = response.aiter_lines()
            async for line in lines:
                if "output_text.delta" in line:
                    break
            with redis_server.client() as client:
                (key,) = client.keys("penstock:log:*")
                client.set(key, "of somebody else")
            rest = [line async for line in lines]
        assert any('"penstock":{"resumable":false}' in line for line in rest)
        assert any("response.completed" in line for line in rest)
    _check_log(caplog, most=1)


def _check_log(caplog: pytest.LogCaptureFixture, *, most: int) -> None:
    """Few warnings, no traceback, and no line too long."""
    ours = [record for record in caplog.records if record.name.startswith("penstock.gateway")]
    for record in ours:
        assert record.exc_info is None, record.getMessage()
        assert len(record.getMessage()) <= _MAX_LINE_CHARS
    warnings = [each.getMessage() for each in ours if each.levelno >= logging.WARNING]
    warnings = [each for each in warnings if "appendonly" not in each]
    assert len(warnings) <= most, warnings
