"""Event streams on the wire: what stock clients need them to be, and to be without."""

from __future__ import annotations

import re
from typing import Any

import pytest

from ..conftest import Serve, Served

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    "/v1/completions": {"prompt": "hello"},
    "/v1/responses": {"input": "hello"},
}
_BLOCK = re.compile(r": ping|data: .+|event: [a-z._]+\ndata: .+")  # no id:, no retry:


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("key", [{}, {"Idempotency-Key": "k"}])
async def test_blocks_of_events_and_of_silence(
    serve: Serve, path: str, key: dict[str, str]
) -> None:
    async with serve(ping_interval_s=0.02) as served:
        served.engine.may_speak.clear()
        body = BODIES[path] | {"stream": True}
        async with served.http.stream("POST", path, json=body, headers=key) as response:
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
            assert response.headers["cache-control"] == "no-cache"
            assert response.headers["x-accel-buffering"] == "no"
            text = ""
            async for piece in response.aiter_text():
                text += piece
                if text.count(": ping") >= 3:  # before the first token
                    served.engine.may_speak.set()
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    assert [block for block in blocks if not _BLOCK.fullmatch(block)] == []
    is_response = path == "/v1/responses"
    assert blocks[0].startswith("event: response.created\n") or not is_response
    assert blocks[-1].startswith("event: response." if is_response else "data: [DONE]")


async def test_the_head_of_a_stream_alone(served: Served) -> None:
    created = await served.http.post("/v1/responses", json={"input": "hello"})
    path = f"/v1/responses/{created.json()['id']}?stream=true"
    for _ in range(2):  # on one connection: a body would be taken for the next answer
        response = await served.http.head(path)
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.content == b""
