"""Bad input: each kind with its status, code and parameter, while another stream goes on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.gateway.api.schema import parsing
from penstock.gateway.generation.request_planner import RequestPlanner

from ..conftest import Serve, Served
from .bad_requests import CASES, CHAT, COMPLETIONS, RESPONSES, USER, chat, says


async def test_each_case_while_a_stream_goes_on(serve: Serve) -> None:
    async with serve(step_s=0.01) as served:
        stream = await served.client.chat.completions.create(
            model="tiny", messages=USER, stream=True, extra_body={"ignore_eos": True}
        )  # fmt: skip
        wrong = [text async for text in _failures(served)]
        assert wrong == []
        num_chunks = 0
        async for _ in stream:
            num_chunks += 1
            if num_chunks == 10:
                break
        await stream.close()
        assert num_chunks == 10


async def _failures(served: Served) -> Any:
    for path, body, status, code, param in CASES:
        content = body.encode() if isinstance(body, str) else body
        response = await served.http.post(path, content=content)
        error = response.json().get("error", {})
        seen = (response.status_code, error.get("code"), error.get("param"))
        if seen != (status, code, param) or not error["message"]:
            yield f"{path} {body[:80]!r}: {seen} instead of {(status, code, param)}"


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_body_over_the_limit(serve: Serve, is_chunked: bool) -> None:
    async def chunks() -> Any:
        for _ in range(40):
            yield b"x" * 50
            await asyncio.sleep(0)

    async with serve(max_body_bytes=1000) as served:
        content = chunks() if is_chunked else b"x" * 1001
        response = await served.http.post(CHAT, content=content)
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "request_too_large"


async def test_long_text_is_tokenised_off_the_loop(served: Served) -> None:
    response = await served.http.post(CHAT, content=says(content="word " * 40_000))
    assert response.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("GET", "/nothing", 404),
        ("GET", CHAT, 405),
        ("POST", "/v1/models", 405),
        ("POST", "/health", 405),
        ("GET", "/v1/models/other", 404),
        ("GET", "/v1/responses/resp_0", 404),
        ("DELETE", "/v1/responses/resp_0", 404),
    ],
)
async def test_wrong_places_answer_in_shape(
    served: Served, method: str, path: str, status: int
) -> None:
    response = await served.http.request(method, path)
    assert response.status_code == status
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert error["code"]


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/tokenize", "POST"),
        ("/detokenize", "POST"),
        ("/health", "GET, HEAD"),
        ("/ready", "GET, HEAD"),
        ("/metrics", "GET, HEAD"),
        ("/version", "GET, HEAD"),
        ("/openapi.json", "GET, HEAD"),
        ("/", "GET, HEAD"),
        ("/chat.js", "GET, HEAD"),
        (CHAT, "POST"),
        ("/v1/models", "GET, HEAD"),
        ("/v1/responses/resp_0", "DELETE, GET, HEAD"),
        ("/v1/conversations/conv_0", "DELETE, GET, HEAD, POST"),
    ],
)
async def test_a_wrong_method_is_told_the_right_ones(
    served: Served, path: str, allowed: str
) -> None:
    for method in {"GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"} - set(allowed.split(", ")):
        response = await served.http.request(method, path)
        assert (response.status_code, response.headers["allow"]) == (405, allowed), method
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "method_not_allowed")
        assert f"{method} {path}" in error["message"]


@pytest.mark.parametrize(
    "values",
    [
        {"n": 1, "tools": [], "tool_choice": "auto", "response_format": {"type": "text"}},
        {"n": None, "stop": None, "logit_bias": None, "audio": None, "seed": None},
        {"user": "u", "metadata": {"a": "b"}, "service_tier": "auto", "store": True, "stop": []},
        {"response_format": {"type": "text", "json_schema": None}, "top_logprobs": 0},
        {"prompt_cache_key": "k", "parallel_tool_calls": False, "modalities": ["text"]},
    ],
)
async def test_what_asks_nothing_is_accepted(served: Served, values: dict[str, Any]) -> None:
    response = await served.http.post(CHAT, content=chat(**values))
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    "values",
    [
        {"reasoning": {"effort": None, "summary": None}, "text": {}, "include": []},
        {"reasoning": {"effort": "none"}, "text": {"format": {"type": "text"}}, "tools": []},
        {"text": {"verbosity": "medium"}, "truncation": "disabled", "background": False},
        {"stream_options": {"include_obfuscation": False}, "metadata": {}, "user": "u"},
    ],
)  # fmt: skip
async def test_what_asks_nothing_of_responses(served: Served, values: dict[str, Any]) -> None:
    response = await served.http.post(RESPONSES, json={"input": "a", **values})
    assert response.status_code == 200, response.text


async def test_a_bug_of_ours_shows_no_stack(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(RequestPlanner, "plan", broken)
    response = await served.http.post(CHAT, content=chat())
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (500, "internal_error")
    assert "secret detail" not in response.text
    [record] = [record for record in caplog.records if record.name.startswith("penstock")]
    assert record.getMessage().rsplit(" ", 1)[1] in error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (RESPONSES, {"input": "x", "include": [1] * 30_000}),
        (RESPONSES, {"input": "x", "metadata": {f"k{index}": 1 for index in range(10_000)}}),
        (RESPONSES, {"input": [1] * 30_000}),
        (COMPLETIONS, {"prompt": [-1] * 30_000}),
        (COMPLETIONS, {"prompt": [[]] * 15_000}),
        (COMPLETIONS, {"prompt": "x", "stop_token_ids": ["a"] * 15_000}),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {f"k{n}": "a" for n in range(9_000)}}),
        (CHAT, {"messages": [[]] * 15_000}),
        (CHAT, {"messages": USER, "stop": [1] * 30_000}),
        (CHAT, {"messages": USER, "stream_options": {f"k{n}": 1 for n in range(10_000)}}),
    ],
)
async def test_a_body_made_of_faults_is_refused_at_the_first(
    served: Served, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    """Otherwise one body would keep the event loop from all streams for seconds."""
    counts: list[int] = []

    def spy(details: Any) -> Any:
        counts.append(len(details))
        return choose(details)

    choose = parsing._most_telling
    monkeypatch.setattr(parsing, "_most_telling", spy)
    response = await served.http.post(path, json=body)
    assert response.status_code == 400
    assert counts
    assert max(counts) <= 8


@pytest.mark.parametrize("name", ["temperature", "logit_bias", "stop", "seed", "stream_options"])
async def test_an_empty_list_asks_nothing(served: Served, name: str) -> None:
    response = await served.http.post(CHAT, json={"messages": USER, name: []})
    assert response.status_code == 200
