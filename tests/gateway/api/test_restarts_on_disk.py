"""What runs when the server is stopped: it goes on in the next one, which has the same disk."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.engine.request import Request, Spent
from penstock.gateway.generation.request_planner import RequestPlanner
from penstock.gateway.storage.response_log.log import Run
from penstock.gateway.storage.response_log.record import EndEntry, Entry

from ..conftest import ANSWER, Serve, Served, until
from ..storage.response_log.records import header
from .keyed import BODIES, CHAT, KEY

_BEFORE = 5  # tokens that the engine says before the server stops
_SEEN = 3  # deltas that its reader has by then
_RESPONSES = "/v1/responses"
_BODY = {"model": "tiny", "input": "one", "stream": True}


@pytest.fixture
def data_dir(tmp_path: Path) -> str:
    path = tmp_path / "data"
    path.mkdir(mode=0o700)
    return str(path)


@contextlib.asynccontextmanager
async def begun(
    serve: Serve, data_dir: str, path: str, body: Mapping[str, Any], **headers: str
) -> AsyncIterator[str]:
    """What the reader of a stream got when the server was stopped: the text of the answer."""
    async with serve(data_dir=data_dir) as served:
        served.engine.holds_in = _BEFORE
        async with served.http.stream("POST", path, json=body, headers=headers) as response:
            assert response.status_code == 200, await response.aread()
            lines = response.aiter_lines()
            got = []
            async for line in lines:
                got.append(line)
                if sum(each.startswith("data: ") and "delta" in each for each in got) == _SEEN:
                    break
            await served.app.state.log_store.hand_over()
            got += [line async for line in lines]
    yield "\n".join(got)


def events_of(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


async def resumed(served: Served, response_id: str, after: int) -> list[dict[str, Any]]:
    query = {"stream": "true", "starting_after": str(after)}
    answer = await served.http.get(f"{_RESPONSES}/{response_id}", params=query)
    assert answer.status_code == 200, answer.text
    return events_of(answer.text)


@pytest.mark.parametrize("goes_on", ["same", "other model", "too late", "background, late"])
async def test_a_response_goes_on_or_ends(serve: Serve, data_dir: str, goes_on: str) -> None:
    """It goes on where the same engines compute it, while somebody may wait for it; else it ends as
    incomplete, and can be continued by who asks for that."""
    body = {**_BODY, "background": goes_on.startswith("background")}
    async with begun(serve, data_dir, _RESPONSES, body) as text:
        before = events_of(text)
    assert before[-1]["type"] == "error", "it was not ended"
    assert before[-1]["code"] == "response_moved"
    before = before[:-1]
    response_id = before[0]["response"]["id"]
    options: dict[str, Any] = {}
    if goes_on == "other model":
        options["info"] = {"cache_root": b"another"}
    elif goes_on != "same":
        options["disconnect_grace_s"] = 0.0
    async with serve(data_dir=data_dir, **options) as served:
        events = before + await resumed(served, response_id, len(before) - 1)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        ended = events[-1]["response"]
        said = "".join(event["delta"] for event in events if event["type"].endswith("text.delta"))
        stored = (await served.http.get(f"{_RESPONSES}/{response_id}")).json()
        assert stored["status"] == ended["status"]
        assert stored["output"][0]["content"][0]["text"] == said
        if goes_on in ("same", "background, late"):
            assert (ended["status"], said) == ("completed", ANSWER)
            (request,) = served.engine.submitted.values()
            assert request.output_token_ids
            return
        assert ended["status"] == "incomplete"
        assert ended["incomplete_details"] == {"reason": "interrupted"}
        assert ANSWER.startswith(said)
        assert said
        assert 0 < ended["usage"]["output_tokens"] <= _BEFORE
        assert not served.engine.submitted
        again = {**_BODY, "input": [], "previous_response_id": response_id, "stream": False}
        rest = await served.http.post(_RESPONSES, json={**again, "penstock": {"continue": True}})
        assert rest.status_code == 200, rest.text


async def test_what_it_used_is_told_alike_after_a_stop_between_turn_and_end(
    serve: Serve, data_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The turn was stored, with what it had used by then; its end was not logged."""
    body = {**_BODY, "stream": False, "background": True}
    with monkeypatch.context() as patch:
        append = Run.append
        ended = []

        def died(run: Run, entry: Entry) -> None:
            if isinstance(entry, EndEntry):
                ended.append(entry)
            else:
                append(run, entry)

        patch.setattr(Run, "append", died)
        async with serve(data_dir=data_dir) as served:
            served.engine.spent = Spent(compute_us=1_000_000, block_us=2_000_000)
            begun = (await served.http.post(_RESPONSES, json=body)).json()
            await until(lambda: ended)
    async with serve(data_dir=data_dir) as served:
        events = await resumed(served, begun["id"], 0)
        told = events[-1]["response"]
        assert told["penstock"]["usage"]["compute_seconds"] == 0.0, "as its engine here says"
        stored = (await served.http.get(f"{_RESPONSES}/{begun['id']}")).json()
        assert stored == told
        (sums,) = (await served.http.get("/v1/usage")).json()["data"][-1]["results"]
        assert sums["num_model_requests"] == 1
        assert sums["input_cached_tokens"] == told["usage"]["input_tokens_details"]["cached_tokens"]
        assert sums["penstock"]["compute_seconds"] == 0.0


async def test_a_conversation_is_free_again(serve: Serve, data_dir: str) -> None:
    """The turn that goes on holds its head, until it ends."""
    async with serve(data_dir=data_dir) as served:
        conversation = (await served.http.post("/v1/conversations", json={})).json()["id"]
    body = {**_BODY, "conversation": conversation}
    async with begun(serve, data_dir, _RESPONSES, body) as text:
        response_id = events_of(text)[0]["response"]["id"]
    async with serve(data_dir=data_dir, step_s=0.01) as served:
        served.engine.may_speak.clear()
        refused = await served.http.post(_RESPONSES, json={**body, "stream": False})
        assert refused.json()["error"]["code"] == "conversation_locked"
        served.engine.may_speak.set()
        await resumed(served, response_id, 0)
        answer = await served.http.post(_RESPONSES, json={**body, "stream": False})
        assert answer.status_code == 200, answer.text


async def test_who_resumes_over_a_websocket_gets_the_rest(serve: Serve, data_dir: str) -> None:
    async with begun(serve, data_dir, _RESPONSES, _BODY) as text:
        before = events_of(text)[:-1]
    async with serve(data_dir=data_dir) as served, served.connect() as socket:
        message = {"type": "penstock.resume", "response_id": before[0]["response"]["id"]}
        await socket.send(json.dumps({**message, "starting_after": len(before) - 1}))
        events = list(before)
        while events[-1]["type"] != "response.completed":
            event = json.loads(await socket.recv())
            if not event["type"].startswith("penstock."):
                events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == ANSWER


@pytest.mark.parametrize("goes_on", [True, False], ids=["same", "other model"])
async def test_a_keyed_answer_outlives_the_server(
    serve: Serve, data_dir: str, goes_on: bool
) -> None:
    """Who asks again with its key gets the same answer; one that cannot go on is begun anew."""
    body = BODIES[CHAT] | {"stream": True}
    async with begun(serve, data_dir, CHAT, body, **KEY) as text:
        first = events_of(text)[0]["id"]
    info = {} if goes_on else {"cache_root": b"another"}
    async with serve(data_dir=data_dir, info=info) as served:
        await until(lambda: not served.app.state.log_store._running)  # else it gets the failure
        again = await _asked(served, body)
        assert _text(again) == ANSWER
        (request,) = served.engine.submitted.values()
        assert bool(request.output_token_ids) == goes_on
        assert (events_of(again)[0]["id"] == first) == goes_on
    async with serve(data_dir=data_dir, info=info) as served:  # it has ended
        assert await _asked(served, body) == again
        assert not served.engine.submitted


async def test_a_disk_that_takes_nothing_ends_no_stream(serve: Serve, data_dir: str) -> None:
    """Its reader is told that it cannot be resumed; what must be stored is refused, with the
    reason; and when there is room, all is well."""
    async with serve(data_dir=data_dir) as served:
        served.engine.holds_in = _BEFORE
        async with served.http.stream("POST", _RESPONSES, json=_BODY) as response:
            lines = response.aiter_lines()
            text = [await anext(lines)]
            while "delta" not in text[-1]:
                text.append(await anext(lines))
            let_write(served, is_allowed=False)
            refused = [await served.http.post(_RESPONSES, json=_BODY) for _ in range(2)]
            served.engine.may_speak.set()
            events = events_of("\n".join(text + [line async for line in lines]))
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        ended = events[-1]["response"]
        assert ended["output"][0]["content"][0]["text"] == ANSWER
        assert any(event.get("penstock") == {"resumable": False} for event in events)
        for each in refused:
            error = each.json()["error"]
            assert (each.status_code, error["code"]) == (503, "session_store_unavailable")
            assert "readonly" in error["message"]
        unstored = {**_BODY, "store": False, "stream": False}
        assert (await served.http.post(_RESPONSES, json=unstored)).status_code == 200
        let_write(served, is_allowed=True)
        logs = served.app.state.log_store
        await until(lambda: not logs._unlogged)
        again = await resumed(served, ended["id"], -1)
        assert again[-1]["response"]["output"] == ended["output"]
        answer = await served.http.post(_RESPONSES, json={**_BODY, "stream": False})
        assert answer.status_code == 200, answer.text
    async with serve(data_dir=data_dir) as served:
        for each in (ended["id"], answer.json()["id"]):
            stored = (await served.http.get(f"{_RESPONSES}/{each}")).json()
            assert stored["output"][0]["content"][0]["text"] == ANSWER


def let_write(served: Served, *, is_allowed: bool) -> None:
    """Into the database."""
    disk = served.app.state.log_store._disk
    disk._writer.execute(f"PRAGMA query_only = {not is_allowed}")


async def _asked(served: Served, body: Mapping[str, Any]) -> str:
    answer: httpx.Response = await served.http.post(CHAT, json=body, headers=KEY)
    assert answer.status_code == 200, answer.text
    return answer.text


def _text(stream: str) -> str:
    chunks = events_of(stream)
    return "".join(
        choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]
    )


async def test_what_cannot_go_on_keeps_nothing_else_from_it(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends, with an error, and the next one is taken over."""
    resume = RequestPlanner.resume
    broken = header()

    def resumed_unless_broken(self: RequestPlanner, request: Request, **options: Any) -> Any:
        if request.request_id == broken.response_id:
            raise ValueError
        return resume(self, request, **options)

    monkeypatch.setattr(RequestPlanner, "resume", resumed_unless_broken)
    store = served.app.state.log_store
    logs = [await store.create(each) for each in (broken, header())]
    for log in logs:
        store.takeovers.put_nowait(log)
    await until(lambda: all(log.is_ended for log in logs))
    first, second = [log.end for log in logs]
    assert first.error[0] == "server_error"
    assert second.error is None
