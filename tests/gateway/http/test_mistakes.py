"""What a gateway answers to requests that are wrong as HTTP or as a WebSocket, byte by byte."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import websockets

from penstock.gateway.http import websocket_protocol

from ...certificate import make_certificate
from ..conftest import ANSWER, PATIENCE_S, Serve, Served

_CHAT = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "stream": True}).encode()
_LONG = b"x" * 60_000
_CHUNKED = b"Transfer-Encoding: chunked\r\n"


@pytest.fixture
async def served(serve: Serve) -> AsyncIterator[Served]:
    async with serve(max_websocket_message_bytes=1 << 20) as served:
        yield served


async def exchange(port: int, *sent: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, header and body of the answer that ends with the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    try:
        writer.write(b"".join(sent))
        async with asyncio.timeout(PATIENCE_S):
            head = await reader.readuntil(b"\r\n\r\n")
            body = await reader.read()
    finally:
        writer.close()
    first, *lines = head.decode("latin-1").splitlines()
    fields = (line.partition(": ") for line in lines if line)
    return int(first.split()[1]), {name.lower(): value for name, _, value in fields}, body


def upgrade(*fields: bytes) -> bytes:
    key = base64.b64encode(os.urandom(16))
    lines = [b"GET /v1/responses HTTP/1.1", b"Connection: Upgrade", b"Upgrade: websocket"]
    lines += [b"Sec-WebSocket-Version: 13", b"Sec-WebSocket-Key: " + key, *fields]
    return b"\r\n".join([*lines, b"", b""])


_OVER = b"Connection: close\r\n\r\n"
_NOT_A_HOST = "is not a name or address with an optional port"
_MISTAKES: dict[str, tuple[bytes, int, str, str]] = {
    "no Host": (b"GET /health HTTP/1.1\r\n" + _OVER, 400, "invalid_host", "0 Host headers"),
    "two Hosts": (
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n" + _OVER,
        400, "invalid_host", "the request has 2 Host headers instead of one",
    ),
    **{
        f"Host {host.decode('latin-1')}": (
            b"GET /health HTTP/1.1\r\nHost: %b\r\n%b" % (host, _OVER),
            400, "invalid_host", _NOT_A_HOST,
        )
        for host in (
            b"a@b", b"localhost:x", b"localhost:80:80", b"a b", b"[::1", b"localhost/", b"a,b c",
            b"http://localhost", b"local\xffhost", b"%zz", b"localhost?x", b"localhost:123456",
        )
    },
    "a long Host": (
        b"GET /health HTTP/1.1\r\nHost: %b@\r\n%b" % (_LONG, _OVER), 400, "invalid_host",
        _NOT_A_HOST,
    ),
    "a Host that is not ours": (
        b"GET /health HTTP/1.1\r\nHost: evil.example\r\n" + _OVER, 403, "host_not_allowed",
        "the Host 'evil.example' is not allowed",
    ),
    "a WebSocket with two Hosts": (
        upgrade(b"Host: localhost", b"Host: localhost"), 400, "invalid_host", "2 Host headers",
    ),
    "a WebSocket at a@b": (upgrade(b"Host: a@b"), 400, "invalid_host", _NOT_A_HOST),
    "a coding in HTTP/1.0": (
        b"POST /v1/chat/completions HTTP/1.0\r\n" + _CHUNKED + b"\r\n0\r\n\r\n",
        400, "invalid_http", "HTTP/1.0 has no Transfer-Encoding",
    ),
    "HTTP/2 in HTTP/1's form": (
        b"GET /health HTTP/2.0\r\nHost: localhost\r\n\r\n",
        505, "http_version_not_supported", "HTTP/2.0 is not supported; HTTP/1.1 is",
    ),
    "a length and a coding": (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n"
        + _CHUNKED + b"\r\n0\r\n\r\n",
        400, "invalid_http", "not valid HTTP",
    ),
    "two lengths": (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n"
        b"Content-Length: 4\r\n\r\nabcd",
        400, "invalid_http", "not valid HTTP",
    ),
    "an unknown coding": (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: best\r\n\r\n",
        400, "invalid_http", "not valid HTTP",
    ),
    **{
        f"{method.decode()} of an unknown path": (
            method + b" /nowhere HTTP/1.1\r\nHost: localhost\r\n" + _OVER,
            404, "not_found", f"{method.decode()} /nowhere: there is no such path",
        )
        for method in (b"GET", b"POST", b"PUT", b"DELETE", b"OPTIONS", b"PATCH")
    },
    "POST of an unknown file": (
        b"POST /nowhere.js HTTP/1.1\r\nHost: localhost\r\n" + _OVER, 404, "not_found",
        "POST /nowhere.js: there is no such path",
    ),
    "POST outside the page": (
        b"POST /../../app.py HTTP/1.1\r\nHost: localhost\r\n" + _OVER, 404, "not_found",
        "there is no such path",
    ),
    "POST of the page": (
        b"POST / HTTP/1.1\r\nHost: localhost\r\n" + _OVER, 405, "method_not_allowed",
        "POST /: the method is not allowed; this path allows GET, HEAD",
    ),
    "POST of an unknown path of the API": (
        b"POST /v1/nowhere HTTP/1.1\r\nHost: localhost\r\n" + _OVER, 404, "not_found",
        "POST /v1/nowhere: there is no such path",
    ),
    "PUT of a known path": (
        b"PUT /v1/models HTTP/1.1\r\nHost: localhost\r\n" + _OVER, 405, "method_not_allowed",
        "PUT /v1/models: the method is not allowed; this path allows GET, HEAD",
    ),
    "a long path": (
        b"GET /%b HTTP/1.1\r\nHost: localhost\r\n%b" % (_LONG, _OVER), 404, "not_found",
        "x…x",
    ),
    "a WebSocket whose Upgrade a proxy dropped": (
        upgrade(b"Host: localhost").replace(b"Connection: Upgrade", b"Connection: close")
        .replace(b"Upgrade: websocket\r\n", b""),
        426, "upgrade_required",
        "/v1/responses is a WebSocket, and the request has no Upgrade header; a proxy in between",
    ),
    "GET of the other WebSocket": (
        b"GET /v1/stats HTTP/1.1\r\nHost: localhost\r\n" + _OVER, 426, "upgrade_required",
        "/v1/stats is a WebSocket",
    ),
    "a WebSocket that is not there": (
        upgrade(b"Host: localhost").replace(b"/v1/responses", b"/v1/realtime"), 404, "not_found",
        "/v1/realtime is not a WebSocket here; /v1/responses and /v1/stats are",
    ),
    "a WebSocket outside the API": (
        upgrade(b"Host: localhost").replace(b"/v1/responses", b"/"), 404, "not_found",
        "/ is not a WebSocket here",
    ),
    "a WebSocket at a path for requests": (
        upgrade(b"Host: localhost").replace(b"/v1/responses", b"/v1/chat/completions"),
        404, "not_found", "/v1/chat/completions is not a WebSocket here",
    ),
    "a long model name": (
        b"GET /v1/models/%b HTTP/1.1\r\nHost: localhost\r\n%b" % (_LONG[:5000], _OVER),
        404, "model_not_found", "…",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", _MISTAKES)
async def test_a_mistake_gets_its_name(
    served: Served, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    sent, status, code, message = _MISTAKES[name]
    found, header, body = await exchange(served.port, sent)
    error = json.loads(body)["error"]
    assert (found, error["code"]) == (status, code)
    assert message in error["message"]
    assert len(error["message"]) <= 480
    assert header["connection"] != "keep-alive"
    if status == 426:
        assert header["upgrade"] == "websocket"
    if status == 405:
        assert "allow" in header
    _check_log(caplog)


_LONG_NAME = "n" * 5000
_LONG_VALUES: dict[str, dict[str, Any]] = {
    "a model": {"model": _LONG_NAME},
    "a field": {_LONG_NAME: 1},
    "a kind": {"tool_choice": _LONG_NAME},
    "a role": {"messages": [{"role": _LONG_NAME, "content": "Hi"}]},
    "a part": {"messages": [{"role": "user", "content": [{"type": _LONG_NAME}]}]},
    "a number": {"temperature": _LONG_NAME},
    "an integer": {"n": int("9" * 4000)},
}


@pytest.mark.parametrize("name", _LONG_VALUES)
async def test_a_long_value_is_not_repeated(
    served: Served, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    body = {"messages": [{"role": "user", "content": "Hi"}], **_LONG_VALUES[name]}
    answer = await served.http.post(
        "/v1/chat/completions", content=json.dumps(body), headers={"x-request-id": _LONG_NAME}
    )
    assert answer.status_code in (400, 404)
    assert len(answer.content) < 2048, answer.text
    async with served.connect() as web:
        await web.send(json.dumps({"type": "response.create", "input": "Hi", **body}))
        event = await web.recv()
        assert json.loads(event)["type"] == "error"
        assert len(event) < 2048
    _check_log(caplog)


def _check_log(caplog: pytest.LogCaptureFixture) -> None:
    for record in caplog.records:
        assert record.exc_info is None
        assert len(record.getMessage()) < 2048


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/models", "/"])
async def test_a_client_of_http_1_0_gets_no_chunks(served: Served, path: str) -> None:
    """The body of a stream ends with the connection (RFC 9112 §6.1, §6.3)."""
    body = {"/v1/chat/completions": _CHAT, "/v1/responses": b'{"input": "Hi", "stream": true}'}
    head = f"{'POST' if path in body else 'GET'} {path} HTTP/1.0\r\n"
    sent = body.get(path, b"")
    length = b"Content-Length: %d\r\nHost: localhost\r\n\r\n" % len(sent)
    status, header, answer = await exchange(served.port, head.encode(), length, sent)
    assert status == 200
    assert "transfer-encoding" not in header
    assert header["connection"] == "close"
    if path not in body:
        assert len(answer) == int(header["content-length"])
        return
    blocks = answer.decode().split("\n\n")
    assert blocks.pop() == ""
    data = [line for block in blocks for line in block.split("\n") if line.startswith("data: {")]
    events = [json.loads(line.removeprefix("data: ")) for line in data]
    if path == "/v1/responses":
        parts = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
    else:
        parts = [e["choices"][0]["delta"].get("content") or "" for e in events if e["choices"]]
        assert blocks[-1] == "data: [DONE]"
    assert "".join(parts) == ANSWER


async def test_http_1_0_needs_no_host(serve: Serve) -> None:
    async with serve(host="0.0.0.0") as served:
        assert (await exchange(served.port, b"GET /health HTTP/1.0\r\n\r\n"))[0] == 200


@pytest.mark.parametrize("num_bytes", [2 << 20, 40 << 20])
async def test_a_refused_message_closes_at_once_over_tls(
    serve: Serve, tmp_path: Path, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the client has answered the close frame: TLS has no end of one direction to wait for."""
    monkeypatch.setattr(websocket_protocol, "_CLOSE_S", 10 * PATIENCE_S)  # would be too late
    certificate, key = make_certificate(tmp_path, password="of the key")
    trust = ssl.create_default_context(cafile=certificate)
    files = {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}
    async with (
        serve(
            max_websocket_message_bytes=1 << 20, ssl_keyfile_password="of the key", **files
        ) as served,
        websockets.connect(
            f"wss://localhost:{served.port}/v1/responses",
            ssl=trust,
            open_timeout=PATIENCE_S,
            close_timeout=10 * PATIENCE_S,
        ) as web,
        asyncio.timeout(PATIENCE_S),
    ):
        await web.send("x" * num_bytes)
        await web.wait_closed()
        assert web.close_code == 1009
