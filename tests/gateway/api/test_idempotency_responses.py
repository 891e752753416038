"""`Idempotency-Key` on `/v1/responses`: a repeated POST gets the same response."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.engine.request import Request, SamplingParams
from penstock.gateway.storage.conversations.ids import conversation_of
from penstock.gateway.storage.idempotency.claims import decode_claim
from penstock.gateway.storage.response_log.record import LogHeader

from ...redis_server import RedisServer
from ..conftest import ANSWER, PATIENCE_S, Serve, Served, until
from ..storage.response_log.records import add_end
from .keyed import KEY, read_chunks
from .test_idempotency_redis import another

RESPONSES = "/v1/responses"
BODY: dict[str, Any] = {"input": "hello"}


async def ask(http: httpx.AsyncClient, headers: dict[str, str] = KEY, **extra: Any) -> Any:
    return await http.post(RESPONSES, json=BODY | extra, headers=headers, timeout=PATIENCE_S)


def events_of(text: str) -> list[Any]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]


async def num_turns(served: Served, conversation: str) -> int:
    tree = await served.http.get(f"/v1/conversations/{conversation}/tree")
    return len(tree.json()["data"])


@pytest.mark.parametrize("kind", ["whole", "stream", "background", "background stream"])
async def test_the_same_response_is_given_again(served: Served, kind: str) -> None:
    conversation = (await served.http.post("/v1/conversations", json={})).json()["id"]
    extra = {
        "conversation": conversation, "background": "background" in kind, "stream": "stream" in kind
    }  # fmt: skip
    first, again = [await ask(served.http, **extra) for _ in range(2)]
    assert (first.status_code, again.status_code) == (200, 200)
    if "stream" in kind:
        assert events_of(again.text) == events_of(first.text)
        response = events_of(first.text)[-1]["response"]
    else:
        response = first.json()
        assert again.json()["id"] == response["id"]
        if kind == "whole":
            assert again.content == first.content
    path = f"{RESPONSES}/{response['id']}"
    stored: Any = {}
    async with asyncio.timeout(PATIENCE_S):
        while stored.get("status") != "completed":
            stored = (await served.http.get(path)).json()
    assert stored["output"][0]["content"][0]["text"] == ANSWER
    assert len(served.engine.submitted) == await num_turns(served, conversation) == 1
    # It is a response like any other, and another key makes another one.
    following = {"Idempotency-Key": "another"}
    last = await ask(served.http, following, previous_response_id=response["id"])
    assert last.json()["previous_response_id"] == response["id"]
    assert len(served.engine.submitted) == 2


async def test_while_it_runs(serve: Serve) -> None:
    async with serve(step_s=0.01) as served:
        body = BODY | {"stream": True}
        async with served.http.stream("POST", RESPONSES, json=body, headers=KEY) as response:
            begun = await read_chunks(response, 5)
        again = await ask(served.http, stream=True)
        assert again.text.startswith(begun[: begun.rindex("\n\n")])
        assert events_of(again.text)[-1]["type"] == "response.completed"
        assert len(served.engine.submitted) == 1


async def test_several_at_once(served: Served) -> None:
    served.engine.may_speak.clear()
    posts = [asyncio.create_task(ask(served.http)) for _ in range(5)]
    await served.submitted()
    served.engine.may_speak.set()
    assert len({(await each).content for each in posts}) == len(served.engine.submitted) == 1


@pytest.mark.parametrize(
    "extra",
    [
        {"input": "other"},
        {"stream": True},
        {"background": True},
        {"conversation": "own"},
        {"previous_response_id": "own"},
    ],
)
async def test_another_body_is_refused(served: Served, extra: dict[str, Any]) -> None:
    first = (await ask(served.http)).json()
    conversation = (await served.http.post("/v1/conversations", json={})).json()["id"]
    own = {"conversation": conversation, "previous_response_id": first["id"]}
    extra = {name: own[name] if value == "own" else value for name, value in extra.items()}
    refused = await ask(served.http, **extra)
    assert (refused.status_code, refused.json()["error"]) == (
        409,
        {
            "message": "this Idempotency-Key was already used with a different body",
            "type": "invalid_request_error",
            "param": "Idempotency-Key",
            "code": "idempotency_key_reused",
        },
    )
    assert refused.headers["x-should-retry"] == "false"
    assert len(served.engine.submitted) == 1
    assert await num_turns(served, conversation) == 0


@pytest.mark.parametrize(
    ("headers", "extra", "message"),
    [
        ({"Idempotency-Key": ""}, {}, "must be 1 to 255 visible ASCII characters"),
        ({"Idempotency-Key": "x" * 256}, {}, "must be 1 to 255 visible ASCII characters"),
        (KEY, {"store": False}, "cannot be used with store: false"),
    ],
)
async def test_what_cannot_have_a_key(
    served: Served, headers: dict[str, str], extra: dict[str, Any], message: str
) -> None:
    refused = await ask(served.http, headers, **extra)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "Idempotency-Key")
    assert message in error["message"]
    assert not served.engine.submitted


async def test_a_refused_or_failed_one_is_a_first_request_again(served: Served) -> None:
    conversation = (await served.http.post("/v1/conversations", json={})).json()["id"]
    assert (await ask(served.http, max_output_tokens=0)).status_code == 400
    assert (await ask(served.http, previous_response_id="resp_nothing")).status_code == 400
    # Its turn cannot begin: another one runs. Its claim goes with it.
    served.engine.may_speak.clear()
    turn = {"conversation": conversation}
    other = asyncio.create_task(ask(served.http, {}, **turn))
    await served.submitted()
    assert (await ask(served.http, **turn)).json()["error"]["code"] == "conversation_locked"
    served.engine.may_speak.set()
    await other
    assert (await ask(served.http, **turn)).status_code == 200
    assert await num_turns(served, conversation) == 2

    served.engine.failure = "no luck"
    key = {"Idempotency-Key": "another"}
    assert (await ask(served.http, key)).status_code == 500
    assert (await ask(served.http, key, stream=True)).status_code == 409
    served.engine.failure = None
    assert (await ask(served.http, key)).json()["status"] == "completed"


async def test_readers_of_a_failing_one_get_its_failure(served: Served) -> None:
    served.engine.may_speak.clear()
    served.engine.failure = "no luck"
    posts = [asyncio.create_task(ask(served.http)) for _ in range(3)]
    await served.submitted()
    [response_id] = served.engine.submitted
    log = await served.app.state.log_store.find("default", response_id)
    await until(lambda: len(log.readers) == 3)
    served.engine.may_speak.set()
    errors = [(answer.status_code, answer.json()) for answer in await asyncio.gather(*posts)]
    assert errors[0][0] == 500
    assert "no luck" in errors[0][1]["error"]["message"]
    assert all(each == errors[0] for each in errors)


@pytest.mark.redis
@pytest.mark.usefixtures("patient_logs")
async def test_gateways_race_for_a_key(
    serve: Serve, model_path: Path, tmp_path: Path, redis_server: RedisServer
) -> None:
    async with (
        serve(redis_url=redis_server.patient_url) as served,
        another(model_path, tmp_path, redis_url=redis_server.patient_url) as other,
    ):
        for number in range(5):
            headers = {"Idempotency-Key": f"race-{number}"}
            gateways = (served.http, other.http) * 2
            answers = await asyncio.gather(*(ask(each, headers) for each in gateways))
            assert len({answer.content for answer in answers}) == 1
            assert answers[0].status_code == 200
        assert len(served.engine.submitted) == 5
        again = [await ask(each, headers) for each in (served.http, other.http)]
        assert {each.content for each in again} == {answers[0].content}
        assert (await ask(other.http, headers, seed=1)).status_code == 409
        with redis_server.client() as client:
            assert all(client.ttl(key) > 0 for key in client.keys("*log*"))


@pytest.mark.redis
async def test_a_claim_of_an_older_gateway_holds(serve: Serve, redis_server: RedisServer) -> None:
    """It is a log without events, whose header names the response."""
    async with serve(redis_url=redis_server.patient_url) as served:
        first = await ask(served.http)
        with redis_server.client() as client:
            (name,) = client.keys("penstock:claim:*")
            claim = decode_claim(client.getdel(name))
        key_id = name.decode().rpartition(":")[2]
        header = LogHeader(
            response_id=key_id,
            conversation_id=conversation_of(key_id) or "",
            tenant="default",
            nonce="1",
            created_at=claim.created_at,
            echo={"body_digest": claim.digest, "response_id": claim.response_id},
            request=Request(
                request_id=key_id,
                prompt_token_ids=(),
                sampling_params=SamplingParams(max_tokens=0),
            ),
            generates=False,
            is_turn=False,
        )
        add_end(await served.app.state.log_store.create(header))
        assert (await ask(served.http)).content == first.content
        assert (await ask(served.http, metadata={"another": "body"})).status_code == 409
        assert len(served.engine.submitted) == 1
