"""Request ids, the line that every request leaves in the log, and what never gets there."""

from __future__ import annotations

import json
import logging
import re
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.engine.process.logs import _JsonFormatter, _TextFormatter
from penstock.gateway.telemetry.access_log import tag_log_lines
from penstock.gateway.telemetry.request_record import request_id_of

from ..conftest import Serve, Served, until

_SECRET = "sk-very-secret-0123456789"
_PROMPT = "the prompt nobody may log"


_CLIENTS = frozenset({"httpx", "httpcore", "openai", "websockets"})  # log in the same process


class _Lines(logging.Handler):
    """Everything that is logged, as it is written in either format."""

    def __init__(self) -> None:
        super().__init__(level=logging.DEBUG)
        self.json: list[dict[str, Any]] = []
        self.text: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.partition(".")[0] in _CLIENTS:
            return
        line = _JsonFormatter().format(record)
        assert "\n" not in line
        self.json.append(json.loads(line))
        self.text.append(_TextFormatter(None).format(record))

    @property
    def access(self) -> list[dict[str, Any]]:
        return [line for line in self.json if line["logger"] == "penstock.access"]

    @property
    def written(self) -> str:
        return json.dumps(self.json) + "\n".join(self.text)


@pytest.fixture
def lines() -> Iterator[_Lines]:
    handler, root = _Lines(), logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    tag_log_lines()
    yield handler
    root.removeHandler(handler)
    root.setLevel(level)


@pytest.mark.parametrize("sent", ["a", "req_0123", "3f2a:b/c+d=@-._", "x" * 128])
def test_a_plain_id_is_kept(sent: str) -> None:
    assert request_id_of(sent.encode()) == sent


@pytest.mark.parametrize(
    "sent", [None, b"", b"x" * 129, b"a b", b"a\nb", b'a"b', b"a\x00", b"\xe4", b"a,b", b"<a>"]
)
def test_any_other_is_made(sent: bytes | None) -> None:
    made = request_id_of(sent)
    assert re.fullmatch(r"req_[0-9a-f]{32}", made)
    assert made != request_id_of(sent)


async def test_every_answer_has_the_id(serve: Serve) -> None:
    async with serve(api_keys=(_SECRET,)) as served:
        mine = {"x-request-id": "mine"}
        for method, path, status in (
            ("GET", "/v1/models", 200),
            ("GET", "/", 200),
            ("GET", "/v1/nothing", 404),
            ("PUT", "/v1/models", 405),
            ("POST", "/v1/chat/completions", 400),
        ):
            answer = await served.http.request(method, path, headers=mine)
            assert (answer.status_code, answer.headers["x-request-id"]) == (status, "mine")
        keyless = {**mine, "authorization": ""}
        refused = await served.http.get("/v1/models", headers=keyless)
        assert (refused.status_code, refused.headers["x-request-id"]) == (401, "mine")
        made = [(await served.http.get("/health")).headers["x-request-id"] for _ in range(2)]
        assert made[0] != made[1]


async def test_a_stream_and_a_websocket_have_it_too(served: Served) -> None:
    body = {"prompt": "x", "max_tokens": 2, "stream": True}
    answer = await served.http.post("/v1/completions", json=body, headers={"x-request-id": "s"})
    assert answer.headers.get_list("x-request-id") == ["s"]
    async with served.connect(additional_headers={"x-request-id": "w"}) as websocket:
        assert websocket.response.headers["x-request-id"] == "w"


async def test_our_own_mistake_is_answered_with_the_id(
    serve: Serve, lines: _Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("penstock.gateway.api.models.json_response", fail)
    async with serve() as served:
        answer = await served.http.get("/v1/models", headers={"x-request-id": "oops"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, "oops")
    assert answer.json()["error"]["code"] == "internal_error"
    [incident] = [line for line in lines.json if "internal error" in line["message"]]
    assert incident["request_id"] == "oops"
    assert "ZeroDivisionError" in incident["exception"]
    assert lines.access[-1]["error"] == "internal_error"


async def test_the_line_of_a_generation(serve: Serve, lines: _Lines) -> None:
    async with serve(api_keys=(_SECRET,)) as served:
        for stream in (False, True):
            await served.http.post(
                "/v1/chat/completions",
                json={
                    "messages": [{"role": "user", "content": _PROMPT}],
                    "max_tokens": 5,
                    "stream": stream,
                },
                headers={"x-request-id": f"id-{stream}"},
            )
        await until(lambda: len(lines.access) == 2)
    for stream, line in zip((False, True), lines.access, strict=True):
        assert line["request_id"] == f"id-{stream}"
        assert (line["method"], line["route"]) == ("POST", "/v1/chat/completions")
        assert (line["status"], line["tenant"], line["level"]) == (200, "default", "info")
        assert (line["input_tokens"] > 5, line["output_tokens"]) == (True, 5)
        assert 0 < line["time_to_first_token_s"] <= line["duration_s"]


async def test_a_websocket_has_one_line(served: Served, lines: _Lines) -> None:
    async with served.connect(additional_headers={"x-request-id": "w"}) as websocket:
        for _ in range(2):
            create = {"type": "response.create", "input": _PROMPT, "max_output_tokens": 3}
            await websocket.send(json.dumps(create))
            while json.loads(await websocket.recv())["type"] != "response.incomplete":
                pass
    await until(lambda: bool(lines.access))
    [line] = lines.access
    assert (line["method"], line["route"], line["status"]) == ("WEBSOCKET", "/v1/responses", 101)
    assert (line["request_id"], line["output_tokens"]) == ("w", 6)


async def test_probes_are_not_told(served: Served, lines: _Lines) -> None:
    for path in ("/health", "/live", "/ready", "/metrics"):
        await served.http.get(path)
    assert lines.access == []


async def test_files_of_the_page_are_not_told(served: Served, lines: _Lines) -> None:
    for path in ("/", "/index.html", "/style.css", "/dashboard", "/dashboard/", "/chat.js"):
        assert (await served.http.get(path)).status_code in (200, 307)
    await served.http.get("/nothing.js")
    await until(lambda: bool(lines.access))
    assert [(line["route"], line["status"]) for line in lines.access] == [(None, 404)]


async def test_files_of_the_page_are_told_by_their_path_at_debug_level(
    served: Served, lines: _Lines
) -> None:
    logging.getLogger().setLevel(logging.DEBUG)
    for path in ("/", "/style.css", "/dashboard/feed.js"):
        assert (await served.http.get(path)).status_code == 200
    with socket.create_connection(("127.0.0.1", served.port)) as raw:
        raw.sendall(b"GET //somebody/../chat.js HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await until(lambda: len(lines.access) == 4)
    assert {(line["route"], line["level"]) for line in lines.access} == {
        ("/", "debug"),
        ("/style.css", "debug"),
        ("/chat.js", "debug"),
        ("/dashboard/feed.js", "debug"),
    }
    assert "GET /style.css 200 in" in "".join(lines.text)


async def test_ids_of_others_are_not_in_the_route(served: Served, lines: _Lines) -> None:
    await served.http.get("/v1/responses/resp_somebody")
    await served.http.get("/v1/conversations/conv_somebody/items/msg_somebody")
    await until(lambda: len(lines.access) == 2)
    assert [line["route"] for line in lines.access] == [
        "/v1/responses/{response_id}",
        "/v1/conversations/{conversation_id}/items/{item_id}",
    ]
    assert "somebody" not in lines.written


async def test_nothing_hostile_and_nothing_secret_is_logged(serve: Serve, lines: _Lines) -> None:
    forged = '\r\n{"level": "error", "message": "forged"}'
    hostile = (
        b"GET /v1/models/%0a%0dforged?ticket=forged%0d%0a HTTP/1.1\r\nHost: localhost\r\n"
        b"X-Request-Id: forged\x1b[31m\r\nUser-Agent: forged\r\n\tforged\r\n"
        b"Authorization: Bearer forged\r\nConnection: close\r\n\r\n"
    )
    async with serve(api_keys=(_SECRET,)) as served:
        with socket.create_connection(("127.0.0.1", served.port)) as raw:
            raw.sendall(hostile)
        for body in (
            {"messages": [{"role": "user", "content": _PROMPT + forged}], "max_tokens": 2},
            {"messages": [{"role": "user", "content": _PROMPT}], "model": forged},
            {"messages": _PROMPT + forged},
            {forged: _PROMPT},
        ):
            await served.http.post("/v1/chat/completions", json=body)
        ticket = (await served.http.post("/v1/tickets")).json()["ticket"]
        async with served.connect(
            additional_headers={}, subprotocols=[f"openai-insecure-api-key.{_SECRET}"]
        ) as websocket:
            await websocket.send(json.dumps({"type": forged, "input": _PROMPT}))
            await websocket.recv()
        await until(lambda: len(lines.access) >= 6)
    written = lines.written
    for secret in (_SECRET, ticket, _PROMPT, "forged"):
        assert secret not in written
    assert all(line.count("\n") == 0 for line in lines.text)
