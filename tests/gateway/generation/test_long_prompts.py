"""Prompts of megabytes: refused by their length, or tokenised beside everything else."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import orjson
import pytest

from penstock.engine.text import Tokenizer
from penstock.gateway.api.schema import parsing
from penstock.gateway.api.shared import json_api
from penstock.gateway.errors import RequestRefusedError
from penstock.gateway.generation import request_planner
from penstock.gateway.generation.request_planner import LongWork

from ..conftest import Serve, Served

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
LONG = "a" * (3 << 20)


def _of(text: str) -> dict[str, dict[str, Any]]:
    messages = [{"role": "user", "content": text}]
    return {
        CHAT: {"messages": messages},
        COMPLETIONS: {"prompt": text},
        RESPONSES: {"input": text},
    }


@pytest.mark.parametrize(
    ("path", "param"), [(CHAT, "messages"), (COMPLETIONS, "prompt"), (RESPONSES, "input")]
)
async def test_what_cannot_fit_is_not_even_tokenised(
    served: Served, monkeypatch: pytest.MonkeyPatch, path: str, param: str
) -> None:
    tokenised: list[int] = []

    def encode(self: Tokenizer, text: str, **_: object) -> list[int]:
        tokenised.append(len(text))
        return [1]

    monkeypatch.setattr(Tokenizer, "encode", encode)
    longest = served.tokenizer.longest_token_bytes
    assert longest is not None
    response = await served.http.post(path, json=_of(LONG)[path])
    error = response.json()["error"]
    assert response.status_code == 400
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert "maximum context length is 1024 tokens. However, your" in error["message"]
    assert "tokens, which leaves no room for output" in error["message"]
    assert tokenised == []
    # Whatever might fit is tokenised: template and all.
    room = 1024 * longest - len("<user>\n<assistant>")
    assert (await served.http.post(path, json=_of("a" * room)[path])).status_code == 200
    assert len(tokenised) == 1


async def test_other_limits_hold_where_the_context_sets_none(serve: Serve) -> None:
    async with serve(max_prompt_bytes=100_000) as served:
        for path, body in (
            (COMPLETIONS, {"prompt": LONG, "truncate_prompt_tokens": 5}),
            (CHAT, {**_of(LONG)[CHAT], "truncate_prompt_tokens": 5}),
            ("/tokenize", {"prompt": LONG}),
            ("/tokenize", _of(LONG)[CHAT]),
        ):
            response = await served.http.post(path, json=body)
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
            assert error["param"] == ("prompt" if "prompt" in body else "messages")
            assert "at most 100000 (--max-prompt-bytes)" in error["message"]
        # It is a limit of the work, not of the context.
        answer = await served.http.post("/tokenize", json={"prompt": LONG[:99_999]})
        assert answer.json()["count"] > 1024
        body = {"prompt": LONG[:99_999], "truncate_prompt_tokens": 5}
        assert (await served.http.post(COMPLETIONS, json=body)).status_code == 200


async def test_the_default_limit_of_work(served: Served) -> None:
    body: dict[str, Any] = {"prompt": LONG, "truncate_prompt_tokens": 5}
    answer = await served.http.post(COMPLETIONS, json=body)
    assert "at most 1048576" in answer.json()["error"]["message"]
    body["prompt"] = LONG[: 1 << 20]
    assert (await served.http.post(COMPLETIONS, json=body)).status_code == 200


async def test_the_loop_turns_while_a_long_text_is_tokenised(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer waits until another request was answered, which on the loop never is."""
    was_answered = threading.Event()
    encode = Tokenizer.encode

    def patient(self: Tokenizer, text: str, **options: Any) -> list[int]:
        assert was_answered.wait(60)
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", patient)
    body = {"prompt": LONG[: 1 << 20], "truncate_prompt_tokens": 5}
    asking = asyncio.create_task(served.http.post(COMPLETIONS, json=body))
    await asyncio.sleep(0.1)
    assert (await served.http.get("/health")).status_code == 200
    was_answered.set()
    assert (await asking).status_code == 200


async def test_the_loop_turns_while_a_large_body_is_parsed(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    was_answered = threading.Event()

    def patient(data: bytes) -> dict[str, Any]:
        assert was_answered.wait(60)
        return parsing.parse_json(data)

    monkeypatch.setattr(json_api, "parse_json", patient)
    body = {"prompt": LONG[: 1 << 20], "truncate_prompt_tokens": 5}
    asking = [asyncio.create_task(served.http.post(COMPLETIONS, json=body)) for _ in range(3)]
    await asyncio.sleep(0.1)
    assert (await served.http.get("/health")).status_code == 200
    was_answered.set()
    assert [answer.status_code for answer in await asyncio.gather(*asking)] == [200] * 3


async def test_long_work_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_planner, "_MAX_OPEN", 5)
    work = LongWork()
    may_end = threading.Event()
    running: list[int] = []
    most: list[int] = []

    def long() -> None:
        running.append(1)
        most.append(len(running))
        may_end.wait(60)
        running.pop()

    tasks = [asyncio.create_task(work.run(long, is_long=True)) for _ in range(5)]
    await asyncio.sleep(0.05)
    with pytest.raises(RequestRefusedError) as caught:
        await work.run(long, is_long=True)
    assert (caught.value.status, caught.value.code) == (503, "server_overloaded")
    tasks.pop().cancel()  # it waited, and makes room
    await asyncio.sleep(0)
    tasks.append(asyncio.create_task(work.run(long, is_long=True)))
    may_end.set()
    await asyncio.gather(*tasks)
    assert len(most) == 5
    assert max(most) <= request_planner._MAX_THREADS
    work.close()


_PART = {"type": "text", "text": ""}


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{}] * 250_000},
        {"messages": [{"role": "user", "content": ""}] * 50_000},
        {"messages": [{"role": "user", "content": [_PART] * 60_000}]},
        {"prompt": [[]] * 250_000},
        {"prompt": [""] * 250_000},
        {"prompt": "x", "chat_template_kwargs": {f"k{number}": 1 for number in range(250_000)}},
        {"prompt": [[[[[[]]]]]] * 50_000},
        {"prompt": [1] * 1_100_000},
        {"prompt": 'many "quotes" [in] {a} text' * 50_000, "stop": [""] * 250_000},
    ],
    ids=lambda body: str(body)[:40],
)
async def test_json_of_too_many_parts_is_not_read(
    served: Served, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any]
) -> None:
    data = orjson.dumps(body)
    assert len(data) < 4 << 20
    monkeypatch.setattr(parsing.orjson, "loads", None)
    for path in (CHAT, COMPLETIONS, RESPONSES, "/tokenize", "/detokenize", "/v1/conversations"):
        response = await served.http.post(path, content=data)
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "request_too_large"


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": [_PART] * 4}] * 4096},
        {"prompt": [7] * 1_000_000},
        {"prompt": 'a "quoted" [1, 2], {"b": "c\\\\"}\n' * 100_000},
        {"prompt": "\\" * 1_000_001},
        {"prompt": '"' * 1_000_001},
        {"prompt": "é😀, [" * 300_000},
    ],
    ids=lambda body: str(body)[:40],
)
def test_text_may_look_like_json(body: dict[str, Any]) -> None:
    assert parsing.parse_json(orjson.dumps(body)) == body
    assert parsing.parse_json(orjson.dumps(body).decode()) == body


async def test_the_loops_lag_is_told(served: Served) -> None:
    async def lag_s() -> float:
        lines = (await served.http.get("/metrics")).text.splitlines()
        name = "penstock:event_loop_lag_seconds_sum"
        return float(next(line for line in lines if line.startswith(name)).split()[-1])

    before = await lag_s()
    time.sleep(0.5)  # noqa: ASYNC251  (the test and the gateway share a loop)
    await asyncio.sleep(0.2)
    assert await lag_s() - before >= 0.3
