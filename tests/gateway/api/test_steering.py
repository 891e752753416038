"""A response that is steered ends, and its successor answers: over WebSocket with the stock
client's types, and over HTTP."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import websockets
from openai.types.responses import ResponsesServerEvent
from pydantic import TypeAdapter

from penstock.gateway.api.responses import steering
from penstock.gateway.api.responses.service import ResponseService
from penstock.gateway.api.responses.steering import MAX_PENDING, MAX_PENDING_BYTES
from penstock.gateway.api.responses.successors import Successors
from penstock.gateway.storage.conversations.ids import conversation_of, successor_id
from penstock.gateway.storage.response_log.log import InMemory

from ..conftest import ANSWER, PATIENCE_S, Serve, Served, until
from ..sockets import send, until_end

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponsesServerEvent)
_CALL = '{"name": "add", "arguments": {"a": 1}}'
_TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}}


def _text(events: list[dict[str, Any]]) -> str:
    return "".join(event["delta"] for event in events if event["type"].endswith("text.delta"))


async def _until(socket: websockets.ClientConnection, kind: str) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    async with asyncio.timeout(PATIENCE_S):
        while not events or events[-1]["type"] != kind:
            events.append(json.loads(await socket.recv()))
    return events


async def _begun(
    served: Served, socket: websockets.ClientConnection, num_deltas: int = 3, **request: Any
) -> str:
    """The id of a response that has said so much, and says no more until the engine may."""
    served.engine.holds_in = num_deltas
    await send(socket, type="response.create", input="one", **request)
    (created,) = await _until(socket, "response.created")
    response_id: str = created["response"]["id"]
    await until(lambda: not served.engine.may_speak.is_set())
    return response_id


async def test_the_successor_answers_on_the_same_lane(served: Served) -> None:
    async with served.connect() as socket:
        await send(socket, type="penstock.ping")
        await socket.recv()
        first = await _begun(served, socket, stream_id="a")
        await send(socket, type="response.steer", previous_response_id=first, input="two")
        before = await _until(socket, "response.incomplete")
        served.engine.may_speak.set()
        after = await until_end(socket)
    events = [*before, *after]
    assert all(event["stream_id"] == "a" for event in events)
    for event in events:
        EVENTS.validate_python(event)
    accepted = next(event for event in before if event["type"] == "response.steer.accepted")
    assert accepted["steer"]["previous_response_id"] == first
    assert [event["sequence_number"] for event in before] == list(range(1, len(before) + 1))
    assert [event["sequence_number"] for event in after] == list(range(len(after)))
    ended, answer = before[-1]["response"], after[-1]["response"]
    assert ended["incomplete_details"] == {"reason": "steered"}
    assert ended["output"][0]["status"] == "incomplete"
    said = ended["output"][0]["content"][0]["text"]
    assert said == _text(before) == ANSWER[: len(said)] != ""
    assert answer["id"] == successor_id(first)
    assert answer["previous_response_id"] == first
    assert _text(after) == ANSWER
    assert served.prompt_of() == f"<user>one\n<assistant>{said}\n<user>two\n<assistant>"
    assert ended["penstock"]["steers"] == [
        {"id": accepted["steer"]["id"], "status": "committed", "successor_id": answer["id"]}
    ]
    stored = (await served.http.get(f"/v1/responses/{first}")).json()
    assert stored["status"] == "incomplete"
    assert stored["penstock"] == ended["penstock"]


async def test_the_stock_client_steers(serve: Serve) -> None:
    async with serve() as served, served.client.responses.connect() as connection:
        served.engine.holds_in = 2
        await connection.response.create(model="tiny", input="hello")
        kinds, text, first = [], "", ""
        async for event in connection:
            kinds.append(event.type)
            if event.type == "response.created":
                first = first or event.response.id
            elif event.type == "response.output_text.delta":
                text += event.delta
                if not served.engine.may_speak.is_set() and "response.steer.accepted" not in kinds:
                    await connection.response.steer(
                        previous_response_id=first,
                        input=[{"type": "message", "role": "user", "content": "shorter"}],
                    )
            elif event.type == "response.incomplete":
                assert event.response.incomplete_details is not None
                assert event.response.incomplete_details.reason == "steered"
                text = ""
                served.engine.may_speak.set()
            elif event.type == "response.completed":
                break
    assert kinds.count("response.created") == 2
    assert kinds.count("response.steer.accepted") >= 1
    assert text == ANSWER


async def test_two_steers_at_once_have_one_successor(served: Served) -> None:
    async with served.connect() as socket, served.connect() as other:
        first = await _begun(served, socket)
        asked = [{"role": "user", "content": "two"}, {"role": "user", "content": "three"}]
        await asyncio.gather(
            send(socket, type="response.steer", previous_response_id=first, input=asked),
            send(other, type="response.steer", previous_response_id=first, input="four"),
        )
        told = json.loads(await other.recv())
        before = await _until(socket, "response.incomplete")
        served.engine.may_speak.set()
        after = await until_end(socket)
    steers = before[-1]["response"]["penstock"]["steers"]
    accepted = [e["steer"]["id"] for e in before if e["type"] == "response.steer.accepted"]
    assert [steer["id"] for steer in steers] == accepted
    assert _text(after) == ANSWER
    if told["type"] == "response.steer.failed":  # the other one was quicker, and is on its way
        assert told["error"]["code"] in ("response_not_active", "response_already_completed")
        assert told["steer"]["input"] == "four"
    else:
        assert told["steer"]["id"] in accepted
    words = {"two", "three", "four"} if len(accepted) == 2 else {"two", "three"}
    assert all(f"<user>{word}\n" in served.prompt_of() for word in words)


@pytest.mark.parametrize("store", [True, False])
async def test_conversations_and_unstored_responses(serve: Serve, store: bool) -> None:
    async with serve() as served, served.connect() as socket:
        settings: dict[str, Any] = {"store": False, "instructions": "Be brief."}
        if store:
            made = await served.client.conversations.create()
            settings = {"conversation": made.id, "instructions": "Be brief."}
        first = await _begun(served, socket, **settings)
        await send(socket, type="response.steer", previous_response_id=first, input="two")
        before = await _until(socket, "response.incomplete")
        said = _text(before)
        served.engine.may_speak.set()
        after = await until_end(socket)
        assert _text(after) == ANSWER
        prompt = f"<system>Be brief.\n<user>one\n<assistant>{said}\n<user>two\n<assistant>"
        assert served.prompt_of() == prompt
        place = {"conversation": made.id} if store else {"store": False}
        place |= {} if store else {"previous_response_id": after[-1]["response"]["id"]}
        await send(socket, type="response.create", input="three", **place)
        await until_end(socket)
        shown = prompt.removeprefix("<system>Be brief.\n")
        assert served.prompt_of() == f"{shown}{ANSWER}\n<user>three\n<assistant>"


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ("", "input"),
        ([], "input"),
        (None, "input"),
        (7, "input"),
        ([{"role": "assistant", "content": "x"}], "input[0].role"),
        ([{"role": "user", "content": ""}], "input[0].content"),
        ([{"type": "function_call_output", "call_id": "c", "output": "x"}], "input[0]"),
        ([{"role": "user", "content": "x", "name": "y"}], "input[0]"),
        ([{"role": "user", "content": [{"type": "input_sound"}]}], "input[0].content"),
    ],
)
async def test_wrong_input_is_refused_and_nothing_is_cut(
    served: Served, value: Any, param: str
) -> None:
    async with served.connect() as socket:
        first = await _begun(served, socket)
        answer = await served.http.post(f"/v1/responses/{first}/steer", json={"input": value})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["code"], error["type"]) == ("invalid_input", "invalid_request_error")
        assert error["param"].startswith(param)
        await send(socket, type="response.steer", previous_response_id=first, input=value)
        *_, failed = await _until(socket, "response.steer.failed")
        assert failed["error"]["code"] == "invalid_input"
        assert failed["steer"] == {"input": value, "previous_response_id": first}
        served.engine.may_speak.set()
        *_, last = await until_end(socket)
        assert last["type"] == "response.completed"


async def test_what_cannot_be_steered_says_why(served: Served) -> None:
    async def code(response_id: str) -> tuple[int, str]:
        answer = await served.http.post(f"/v1/responses/{response_id}/steer", json={"input": "x"})
        return answer.status_code, answer.json()["error"]["code"]

    ended = await served.client.responses.create(model="tiny", input="one")
    assert await code(ended.id) == (409, "response_already_completed")
    assert await code("resp_" + 48 * "0") == (404, "response_not_found")
    assert await code("nonsense") == (404, "response_not_found")
    async with served.connect() as socket:
        for field in ({"previous_response_id": "resp_1", "model": "x"}, {}):
            await send(socket, type="response.steer", input="x", **field)
            (failed,) = await _until(socket, "response.steer.failed")
            assert failed["error"]["code"] == "invalid_input"
            EVENTS.validate_python(failed) if field else None
        await send(socket, type="response.steer", input="x", previous_response_id="resp_1")
        (failed,) = await _until(socket, "response.steer.failed")
        assert failed["error"]["code"] == "response_not_found"
        served.engine.may_speak.clear()
        await send(socket, type="response.create", input="one", generate=False)
        (created,) = await _until(socket, "response.created")
        assert await code(created["response"]["id"]) == (400, "steering_not_supported")


async def test_http_with_a_key_steers_once_and_tells_the_outcome(served: Served) -> None:
    async with served.connect() as socket:
        first = await _begun(served, socket)
        key = {"Idempotency-Key": "k1"}
        path = f"/v1/responses/{first}/steer"
        said = (await served.http.post(path, json={"input": "two"}, headers=key)).json()
        assert said["object"] == "response.steer"
        assert said["previous_response_id"] == first
        before = await _until(socket, "response.incomplete")
        again = (await served.http.post(path, json={"input": "two"}, headers=key)).json()
        assert again["id"] == said["id"]
        assert again["status"] == "committed"
        assert again["successor_id"] == successor_id(first)
        other = await served.http.post(path, json={"input": "other"}, headers=key)
        assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_key_reused")
        late = await served.http.post(path, json={"input": "late"})
        assert late.json()["error"]["code"] == "response_already_completed"
        served.engine.may_speak.set()
        assert _text(await until_end(socket)) == ANSWER
    assert len([e for e in before if e["type"] == "response.steer.accepted"]) == 1
    # Who resumes learns the same.
    lines = (await served.http.get(f"/v1/responses/{first}?stream=true")).text.splitlines()
    replayed = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert replayed[1:] == before
    # And who asks again when the stream has expired.
    await served.app.state.log_store.delete("default", first)
    assert (await served.http.post(path, json={"input": "two"}, headers=key)).json() == again
    late = await served.http.post(path, json={"input": "late"})
    assert late.json()["error"]["code"] == "response_already_completed"


async def test_a_response_takes_so_many_steers(served: Served, soon_alarmed: None) -> None:
    async with served.connect() as socket:
        first = await _begun(served, socket)
        served.engine.kill()  # its successor waits for it
        await until(lambda: served.app.state.engine.info is None)
        path = f"/v1/responses/{first}/steer"
        for number in range(MAX_PENDING):
            answer = await served.http.post(path, json={"input": f"n{number}"})
            assert answer.json()["status"] == "accepted"
        answer = await served.http.post(path, json={"input": "more"})
        code = answer.json()["error"]["code"]
        assert (answer.status_code, code) == (429, "too_many_pending_steers")
        served.engine.may_speak.set()
        served.engine.holds_in = None
        served.engine.restart()
        *_, ended = await _until(socket, "response.incomplete")
        assert len(ended["response"]["penstock"]["steers"]) == MAX_PENDING
        assert _text(await until_end(socket)) == ANSWER
    assert served.prompt_of().count("<user>n") == MAX_PENDING


async def test_the_last_steer_that_has_room_is_accepted_however_late_it_is_stored(
    served: Served, soon_alarmed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steering, "_ASK_AGAIN_S", 0.01)
    async with served.connect() as socket:
        first = await _begun(served, socket)
        served.engine.kill()
        await until(lambda: served.app.state.engine.info is None)
        path = f"/v1/responses/{first}/steer"
        for number in range(MAX_PENDING - 1):
            await served.http.post(path, json={"input": f"n{number}"})
        log = await served.app.state.log_store.find("default", first)
        with monkeypatch.context() as patch:
            patch.setattr(InMemory, "store", lambda *_: None)
            last = asyncio.create_task(served.http.post(path, json={"input": "last"}))
            await until(lambda: len(log.steers) == MAX_PENDING)
            await asyncio.sleep(0.05)  # it asks again
        log.storage.store(log)
        answer = await last
        assert (answer.status_code, answer.json()["status"]) == (200, "accepted")
        served.engine.may_speak.set()
        served.engine.holds_in = None
        served.engine.restart()
        await _until(socket, "response.incomplete")
        await until_end(socket)


async def test_what_steers_is_counted_in_bytes(served: Served) -> None:
    async with served.connect() as socket:
        first = await _begun(served, socket)
        said = "é" * (MAX_PENDING_BYTES // 2)
        answer = await served.http.post(f"/v1/responses/{first}/steer", json={"input": said})
        assert answer.json()["error"]["code"] == "too_many_pending_steers"
        served.engine.may_speak.set()
        await until_end(socket)


@pytest.mark.parametrize("num_allowed", [1, 2])
async def test_a_steer_and_its_successor_count_as_requests(
    serve: Serve, tmp_path: Path, num_allowed: int
) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(
        f"[tenants.acme]\nrequests_per_minute = {num_allowed}\n"
        '[[keys]]\nkey = "sk-acme-0123456789abcdef"\ntenant = "acme"\n'
    )
    key = {"Authorization": "Bearer sk-acme-0123456789abcdef"}
    async with (
        serve(api_keys_file=str(keys)) as served,
        served.connect(additional_headers=key) as socket,
    ):
        first = await _begun(served, socket)
        path = f"/v1/responses/{first}/steer"
        answer = await served.http.post(path, json={"input": "two"}, headers=key)
        served.engine.may_speak.set()
        if num_allowed == 1:
            assert answer.status_code == 429
            assert answer.headers["retry-after"]
            *_, last = await until_end(socket)
            assert last["type"] == "response.completed"
        else:  # the client gets its input back
            assert answer.json()["status"] == "accepted"
            *_, failed = await _until(socket, "response.steer.failed")
            assert failed["error"]["code"] == "successor_creation_failed"
            assert failed["steer"]["input"] == "two"
            EVENTS.validate_python(failed)


_CALLED = f"Hi.<tool_call>\n{_CALL}\n</tool_call>"


@pytest.mark.parametrize(
    ("said", "kinds", "waits"),
    [
        (_CALLED, ["message", "function_call"], True),
        (_CALLED + _CALLED[3:40], ["message", "function_call"], True),
        (_CALLED[:40], ["message"], False),
        (_CALLED[:9], ["message"], False),
    ],
)
async def test_a_whole_call_waits_for_its_result_and_half_of_one_is_dropped(
    serve: Serve, said: str, kinds: list[str], waits: bool
) -> None:
    async with serve(tool_call_parser="hermes") as served, served.connect() as socket:
        tokens = served.tokenizer.encode(said)
        served.engine.script = [*tokens, *served.tokenizer.encode(" And so on.")]
        first = await _begun(served, socket, len(tokens), tools=[_TOOL])
        served.engine.script = served.tokenizer.encode(ANSWER)
        await send(socket, type="response.steer", previous_response_id=first, input="two")
        before = await until_end(socket)
        ended = before[-1]["response"]
        assert [item["type"] for item in ended["output"]] == kinds
        added = [event for event in before if event["type"] == "response.output_item.added"]
        done = [event for event in before if event["type"] == "response.output_item.done"]
        assert len(added) == len(done)
        if waits:
            assert before[-1]["type"] == "response.completed"
            (pending,) = await _until(socket, "response.steer.pending")
            EVENTS.validate_python(pending)
            call = ended["output"][1]
            assert pending["required_input"] == [
                {"type": "function_call_output", "call_id": call["call_id"], "name": "add"}
            ]
            assert pending["sequence_number"] == before[-1]["sequence_number"] + 1
            served.engine.may_speak.set()
            result = {**pending["required_input"][0], "output": "3"}
            del result["name"]
            answers = [{"input": [result], "previous_response_id": first} for _ in range(2)]
            for answer in answers:  # the second one is a branch, to which nobody steered
                await send(socket, type="response.create", **answer, tools=[_TOOL])
                created, *after = await until_end(socket)
                assert _text(after) == ANSWER
                is_first = answer is answers[0]
                assert ("<user>two\n" in served.prompt_of()) == is_first
                assert (created["response"]["id"] == successor_id(first)) == is_first
        else:
            assert before[-1]["type"] == "response.incomplete"
            served.engine.may_speak.set()
            assert _text(await until_end(socket)) == ANSWER
            assert "tool_call" not in served.prompt_of().split("<user>two")[0].split("Hi.")[1]


async def _waiting(served: Served, socket: websockets.ClientConnection, **request: Any) -> Any:
    """A response that has made a call and been steered, and the request that answers the call."""
    tokens = served.tokenizer.encode(_CALLED)
    served.engine.script = [*tokens, *served.tokenizer.encode(" And so on.")]
    first = await _begun(served, socket, len(tokens), tools=[_TOOL], **request)
    served.engine.script = served.tokenizer.encode(ANSWER)
    await send(socket, type="response.steer", previous_response_id=first, input="two")
    (pending,) = (await _until(socket, "response.steer.pending"))[-1:]
    served.engine.may_speak.set()
    result = {**pending["required_input"][0], "output": "3"}
    del result["name"]
    return {"input": [result], "previous_response_id": first, "tools": [_TOOL]}


async def test_what_answers_an_unstored_call_is_in_a_tree_of_its_own(serve: Serve) -> None:
    async with serve(tool_call_parser="hermes") as served, served.connect() as socket:
        answer = await _waiting(served, socket, store=False)
        await send(socket, type="response.create", **answer)
        created, *_ = await until_end(socket)
        assert "<user>two\n" in served.prompt_of()
        second = created["response"]["id"]
        stored = await served.http.get(f"/v1/responses/{second}")
        assert stored.status_code == 200
        third = await served.client.responses.create(
            model="tiny", input="three", previous_response_id=second
        )
        assert conversation_of(third.id) == conversation_of(second)


@pytest.mark.parametrize("is_stored", [True, False])
async def test_only_the_first_request_after_a_call_gets_the_steer(
    serve: Serve, is_stored: bool
) -> None:
    """Whether it is stored or not, and also after it has been deleted."""
    async with serve(tool_call_parser="hermes") as served, served.connect() as socket:
        answer = await _waiting(served, socket, stream_id="a", store=is_stored)
        place = {"store": False, "stream_id": "b"}
        await send(socket, type="response.create", **answer, **place)
        created, *_ = await until_end(socket)
        assert "<user>two\n" in served.prompt_of()
        await send(socket, type="response.create", **answer, **place)
        await until_end(socket)
        assert "<user>two\n" not in served.prompt_of()
        if is_stored:
            first = answer["previous_response_id"]
            stored = (await served.http.get(f"/v1/responses/{first}")).json()
            (told,) = stored["penstock"]["steers"]
            assert (told["status"], told["successor_id"]) == (
                "committed",
                created["response"]["id"],
            )


async def test_a_pending_steer_goes_with_the_response_that_took_it(serve: Serve) -> None:
    async with serve(tool_call_parser="hermes") as served, served.connect() as socket:
        answer = await _waiting(served, socket)
        made = (await served.http.post("/v1/responses", json=answer)).json()
        assert "<user>two\n" in served.prompt_of()
        assert (await served.http.delete(f"/v1/responses/{made['id']}")).status_code == 200
        await served.http.post("/v1/responses", json=answer)
        assert "<user>two\n" not in served.prompt_of()


def _begin_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next two responses are stored at the same time."""
    original = ResponseService._begin
    both = asyncio.Barrier(2)
    num_begun = 0

    async def begin(self: ResponseService, *args: Any, **options: Any) -> Any:
        nonlocal num_begun
        num_begun += 1
        if num_begun <= 2:
            await both.wait()
        return await original(self, *args, **options)

    monkeypatch.setattr(ResponseService, "_begin", begin)


@pytest.mark.parametrize("is_stored", [True, False])
async def test_of_two_lanes_at_once_one_gets_a_pending_steer(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, is_stored: bool
) -> None:
    """Also if the response before is one that only the connection remembers."""
    async with serve(tool_call_parser="hermes") as served, served.connect() as socket:
        answer = await _waiting(served, socket, stream_id="a", store=is_stored)
        _begin_together(monkeypatch)
        for lane in ("b", "c"):
            place = {"store": False, "stream_id": lane}
            await send(socket, type="response.create", **answer, **place)
        ends: list[dict[str, Any]] = []
        while len(ends) < 2:
            ends += (await until_end(socket))[-1:]
        assert {end["type"] for end in ends} == {"response.completed"}
        prompts = [served.prompt_of(-1), served.prompt_of(-2)]
        assert sorted("<user>two\n" in prompt for prompt in prompts) == [False, True]


async def test_two_requests_with_keys_that_answer_one_call_get_their_own_answers(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve(tool_call_parser="hermes") as served, served.connect() as socket:
        answer = await _waiting(served, socket)
        _begin_together(monkeypatch)
        posts = [
            served.http.post("/v1/responses", json=answer, headers={"Idempotency-Key": key})
            for key in ("k1", "k2")
        ]
        ids = [each.json()["id"] for each in await asyncio.gather(*posts)]
        assert len(set(ids)) == 2
        assert successor_id(answer["previous_response_id"]) in ids
        for key, known in zip(("k1", "k2"), ids, strict=True):
            headers = {"Idempotency-Key": key}
            again = await served.http.post("/v1/responses", json=answer, headers=headers)
            assert again.json()["id"] == known


async def test_a_steer_of_a_thought(serve: Serve) -> None:
    async with serve(reasoning_parser="qwen3") as served, served.connect() as socket:
        tokens = served.tokenizer.encode("<think>\nI wonder")
        served.engine.script = [*tokens, *served.tokenizer.encode(" why.\n</think>\n\nSo.")]
        first = await _begun(served, socket, len(tokens))
        await send(socket, type="response.steer", previous_response_id=first, input="two")
        *_, ended = await _until(socket, "response.incomplete")
        served.engine.may_speak.set()
        (thought,) = ended["response"]["output"]
        assert (thought["type"], thought["status"]) == ("reasoning", "incomplete")
        assert thought["content"][0]["text"] == "I wonder"
        *_, last = await until_end(socket)
        assert last["type"] == "response.completed"
        assert "<user>two" in served.prompt_of()


async def test_cancelling_after_a_steer_ends_both(served: Served) -> None:
    async with served.connect() as socket:
        first = await _begun(served, socket)
        await served.http.post(f"/v1/responses/{first}/steer", json={"input": "two"})
        await _until(socket, "response.incomplete")
        await send(socket, type="penstock.cancel", response_id=successor_id(first))
        *_, last = await until_end(socket)
        assert last["response"]["status"] == "cancelled"


async def test_a_cancel_while_the_successor_is_planned_stops_both(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Successors.plan
    cancels: list[asyncio.Task[Any]] = []

    async def plan(self: Successors, log: Any, *args: Any) -> Any:
        planned = await original(self, log, *args)
        path = f"/v1/responses/{log.response_id}/cancel"
        cancels.append(asyncio.create_task(served.http.post(path)))  # answered at the end
        await until(lambda: log.replica.is_cancelled)
        return planned

    monkeypatch.setattr(Successors, "plan", plan)
    async with served.connect() as socket:
        first = await _begun(served, socket)
        await send(socket, type="response.steer", previous_response_id=first, input="two")
        *before, failed = await _until(socket, "response.steer.failed")
        assert failed["error"]["code"] == "response_not_active"
        assert failed["steer"]["input"] == "two"
        assert before[-1]["response"]["status"] == "cancelled"
        stored = (await served.http.get(f"/v1/responses/{first}")).json()
        assert stored["status"] == "cancelled"
        assert stored["penstock"] == before[-1]["response"]["penstock"]
        gone = await served.http.get(f"/v1/responses/{successor_id(first)}")
        assert gone.status_code == 404
        assert list(served.engine.submitted) == [first]
        assert (await cancels[0]).json()["status"] == "cancelled"


async def test_an_engine_that_dies_while_the_successor_is_planned_is_waited_for(
    served: Served, soon_alarmed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Successors.plan

    async def plan(self: Successors, *args: Any) -> Any:
        if served.engine.num_deaths:
            return await original(self, *args)
        served.engine.kill()
        await until(lambda: served.app.state.engine.info is None)
        try:
            return await original(self, *args)
        finally:
            served.engine.restart()

    monkeypatch.setattr(Successors, "plan", plan)
    async with served.connect() as socket:
        first = await _begun(served, socket)
        served.engine.may_speak.set()
        await send(socket, type="response.steer", previous_response_id=first, input="two")
        *_, ended = await _until(socket, "response.incomplete")
        assert ended["response"]["penstock"]["steers"][0]["status"] == "committed"
        assert _text(await until_end(socket)) == ANSWER
    assert served.engine.num_deaths == 1


async def test_a_response_that_is_ended_as_a_running_request_is_not_steered_on(
    served: Served,
) -> None:
    async with served.connect() as socket:
        first = await _begun(served, socket)
        log = await served.app.state.log_store.find("default", first)
        answer = await served.http.post(f"/v1/requests/{first}/cancel")
        assert answer.status_code == 200
        assert log.replica.is_cancelled
        *_, last = await until_end(socket)
        assert last["response"]["status"] == "cancelled"
