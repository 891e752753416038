"""Requests whose preparation takes long in Python: everything else goes on beside them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from penstock.engine.chat_formats import offered_tools
from penstock.engine.structured_outputs import forms
from penstock.engine.text import ChatTemplate
from penstock.gateway.errors import RequestRefusedError
from penstock.gateway.generation import paced_work
from penstock.gateway.generation.paced_work import LARGE, PacedWork, work_of
from penstock.gateway.telemetry.request_record import CURRENT_REQUEST, RequestRecord

from ..conftest import Served

_MESSAGES = [{"role": "user", "content": "a"}]
_SCHEMA = {
    "type": "object",
    "properties": {f"p{number}": {"type": "string"} for number in range(LARGE)},
}
_TOOL = {"name": "f", "parameters": _SCHEMA, "strict": True}
_COSTLY = {"properties": {name: {"pattern": "^(?=a)[a-z]b?"} for name in "abcd"}}
_SMALL = {"name": "f", "parameters": _COSTLY, "strict": True}
_FORMAT = {"name": "a", "schema": _SCHEMA, "strict": True}
_MANY = [*_MESSAGES, {"role": "assistant", "content": "b"}] * 50 + _MESSAGES
_RESULT = {"role": "tool", "tool_call_id": "0", "content": "a"}


def _calling(num_calls: int, text: str) -> dict[str, Any]:
    called = {"name": "f", "arguments": f'{{"a": "{text}"}}'}
    calls = [{"id": str(n), "type": "function", "function": called} for n in range(num_calls)]
    return {"role": "assistant", "content": None, "tool_calls": calls}


LARGE_BODIES: list[tuple[object, str, dict[str, Any]]] = [
    (
        offered_tools,
        "enforceable",
        {"messages": _MESSAGES, "tools": [{"type": "function", "function": _SMALL}]},
    ),
    (
        forms,
        "enforceable",
        {
            "messages": _MESSAGES,
            "response_format": {"type": "json_schema", "json_schema": _FORMAT},
        },
    ),
    (ChatTemplate, "render", {"messages": _MANY}),
    (ChatTemplate, "render", {"messages": [*_MESSAGES, _calling(1, "x" * (64 << 10)), _RESULT]}),
    (ChatTemplate, "render", {"messages": [*_MESSAGES, _calling(100, "x"), *[_RESULT] * 20]}),
]


def noting(
    function: Callable[..., Any], is_free: list[bool], own: threading.Thread
) -> Callable[..., Any]:
    def run(*args: Any, **options: Any) -> Any:
        is_free.append(threading.current_thread() is not own)
        return function(*args, **options)

    return run


@pytest.mark.parametrize(("place", "name", "body"), LARGE_BODIES)
async def test_large_requests_are_prepared_off_the_event_loop(
    served: Served, monkeypatch: pytest.MonkeyPatch, place: object, name: str, body: dict[str, Any]
) -> None:
    is_free = list[bool]()
    noted = noting(getattr(place, name), is_free, threading.current_thread())
    monkeypatch.setattr(place, name, noted)
    response = await served.http.post("/v1/chat/completions", json={**body, "max_tokens": 1})
    assert response.status_code in (200, 400)  # the tiny context may be too short for it
    assert is_free
    assert all(is_free)


async def test_many_messages_are_validated_off_the_event_loop(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = list[threading.Thread]()
    parse = paced_work.PacedWork.run

    async def run(self: PacedWork, work: Callable[[], Any], *, size: int) -> Any:
        def noted() -> Any:
            threads.append(threading.current_thread())
            return work()

        return await parse(self, noted, size=size)

    monkeypatch.setattr(PacedWork, "run", run)
    body = {"messages": _MANY * 10, "max_tokens": 1}
    response = await served.http.post("/v1/chat/completions", json=body)
    assert response.status_code in (200, 400)
    assert threads
    assert threading.current_thread() not in threads


def test_what_is_large() -> None:
    assert work_of({"messages": _MESSAGES, "temperature": 1.0, "stop": ["a"]}) < 20
    assert work_of({"messages": [{"role": "user", "content": "(?=a)" * 100_000}]}) < 20
    assert work_of({"prompt": list(range(10_000))}) < LARGE
    assert work_of({"messages": _MANY * 3}) >= LARGE
    assert work_of({"tools": [_TOOL]}) >= LARGE
    assert work_of({"guided_json": "x" * (64 << 10)}) >= LARGE  # a schema in a text
    assert work_of({"guided_json": f" {_SCHEMA}"}) >= LARGE
    assert work_of({"guided_json": {"enum": [*range(LARGE * 4)]}}) >= LARGE
    assert work_of({"guided_json": {"const": [[0] * 60] * LARGE}}) >= LARGE
    assert work_of({"guided_grammar": "root ::= [a-z" + "a" * LARGE + "]"}) >= LARGE
    assert work_of({"json_schema": _COSTLY}) >= LARGE


def test_it_rests_as_long_as_keeps_it_to_its_share() -> None:
    now_s = 0.0
    work = PacedWork(lambda: now_s)
    assert work.rest_s(paced_work._BURST_S) == 0  # at once
    spent_s = 0.0
    for _ in range(50):
        rest_s = work.rest_s(0.05)
        spent_s += 0.05
        now_s += rest_s
    assert spent_s / now_s == pytest.approx(paced_work._SHARE, rel=0.01)
    now_s += 60
    assert work.rest_s(paced_work._BURST_S) == 0
    work.close()


async def test_tenants_take_turns_and_a_full_queue_refuses_who_filled_it() -> None:
    work = PacedWork()
    may_go = threading.Event()
    order = list[str]()

    async def ask(tenant: str, size: int) -> None:
        record = RequestRecord(request_id="r", scope={"type": "http"}, tenant=tenant)
        CURRENT_REQUEST.set(record)
        await work.run(lambda: order.append(f"{tenant}{size}"), size=size)

    first = asyncio.create_task(work.run(lambda: may_go.wait(60), size=0))
    await asyncio.sleep(0)
    flood = [asyncio.create_task(ask("a", size)) for size in range(paced_work.MAX_OPEN + 1, 1, -1)]
    other = [asyncio.create_task(ask("b", size)) for size in (9, 8)]
    await asyncio.sleep(0.01)
    may_go.set()
    await asyncio.gather(first, *other)
    refused = [
        error
        for error in await asyncio.gather(*flood, return_exceptions=True)
        if isinstance(error, RequestRefusedError)
    ]
    assert order[:4] in (["a2", "b8", "a3", "b9"], ["b8", "a2", "b9", "a3"])
    assert len(refused) == 3
    assert (refused[0].status, refused[0].code) == (503, "server_overloaded")
    work.close()
