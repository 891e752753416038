"""A gateway that keeps its state on disk: what outlives it, and what is never on the disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ..conftest import ANSWER, Serve, Served

WORD = "gooseberry"
BODY = {"model": "tiny", "input": f"What is a {WORD}?"}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


def files_with(data: Path, word: str = WORD) -> list[str]:
    files = [path for path in data.rglob("*") if path.is_file()]
    return [path.name for path in files if word.encode() in path.read_bytes()]


async def erased(served: Served) -> None:
    await served.app.state.conversations.erased()


async def post(served: Served, path: str, body: dict[str, Any]) -> Any:
    answer = await served.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_conversations_and_answers_outlive_the_gateway(serve: Serve, data: Path) -> None:
    async with serve(data_dir=str(data)) as served:
        conversation = await post(served, "/v1/conversations", {"metadata": {"title": "t"}})
        body = BODY | {"conversation": conversation["id"]}
        first = await post(served, "/v1/responses", body)
        key = {"Idempotency-Key": "k"}
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
        kept = await served.http.post("/v1/chat/completions", json=chat, headers=key)
    async with serve(data_dir=str(data)) as served:
        listed = (await served.http.get("/v1/conversations")).json()
        assert [each["id"] for each in listed["data"]] == [conversation["id"]]
        assert listed["penstock"]["durable"]
        path = f"/v1/responses/{first['id']}"
        assert (await served.http.get(path)).json() == first
        stream = await served.http.get(path, params={"stream": "true"})
        assert "response.completed" in stream.text
        again = await served.http.post("/v1/chat/completions", json=chat, headers=key)
        assert again.json() == kept.json()
        assert served.engine.submitted == {}
        second = await post(served, "/v1/responses", body | {"input": "And then?"})
        tree = (await served.http.get(f"/v1/conversations/{conversation['id']}/tree")).json()
        assert [each["turn"] for each in tree["data"]] == [first["id"], second["id"]]
        assert served.prompt_of().count(ANSWER) == 1


async def test_what_is_not_to_be_stored_is_never_on_the_disk(serve: Serve, data: Path) -> None:
    messages = {"model": "tiny", "messages": [{"role": "user", "content": WORD}]}
    async with serve(data_dir=str(data)) as served:
        await post(served, "/v1/responses", BODY | {"store": False})
        await post(served, "/v1/chat/completions", messages)
        await post(served, "/v1/messages", messages | {"max_tokens": 9})
        await post(served, "/v1/completions", {"model": "tiny", "prompt": WORD})
        async with served.http.stream(
            "POST", "/v1/responses", json=BODY | {"store": False, "stream": True}
        ) as stream:
            assert b"response.completed" in await stream.aread()
        async with served.connect() as socket:
            event = {"type": "response.create", **BODY, "store": False}
            await socket.send(json.dumps(event))
            while "response.completed" not in str(await socket.recv()):
                pass
        assert files_with(data) == []
        await post(served, "/v1/responses", BODY)
        assert files_with(data)


@pytest.mark.parametrize("what", ["conversation", "response", "item"])
async def test_what_is_deleted_is_in_no_file(serve: Serve, data: Path, what: str) -> None:
    async with serve(data_dir=str(data)) as served:
        metadata = {"title": f"A {WORD}"} if what == "conversation" else {}
        conversation = await post(served, "/v1/conversations", {"metadata": metadata})
        path = f"/v1/conversations/{conversation['id']}"
        body = BODY | {"conversation": conversation["id"]}
        response = await post(served, "/v1/responses", body)
        await post(served, "/v1/responses", body | {"input": "And then?"})
        assert files_with(data)
        if what == "conversation":
            assert (await served.http.delete(path)).status_code == 200
        elif what == "response":
            assert (await served.http.delete(f"/v1/responses/{response['id']}")).status_code == 200
        else:
            items = (await served.http.get(f"{path}/items", params={"order": "asc"})).json()
            item = items["data"][0]
            assert WORD in item["content"][0]["text"]
            assert (await served.http.delete(f"{path}/items/{item['id']}")).status_code == 200
        await erased(served)
        assert files_with(data) == []
        if what == "item":
            shown = (await served.http.get(f"/v1/responses/{response['id']}")).json()
            assert shown["output"][0]["content"][0]["text"] == ANSWER
            await post(served, "/v1/responses", body | {"input": "Go on."})
            assert WORD not in served.prompt_of()


async def test_a_conversation_goes_on_under_another_model(
    serve: Serve, data: Path, model_path: Path
) -> None:
    """Its token ids are not used again: the other model may have other ones for the same text."""
    cut = BODY | {"max_output_tokens": 2}
    async with serve(data_dir=str(data)) as served:
        first = await post(served, "/v1/responses", cut)
        assert first["status"] == "incomplete"
        go_on = {"model": "tiny", "previous_response_id": first["id"]}
    config = model_path / "config.json"
    before = config.read_text()
    config.write_text(json.dumps({**json.loads(before), "hidden_size": 64}))
    try:
        async with serve(data_dir=str(data)) as served:
            body = go_on | {"input": [], "penstock": {"continue": True}}
            refused = await served.http.post("/v1/responses", json=body)
            assert refused.status_code == 409, refused.text
            assert refused.json()["error"]["code"] == "response_of_another_model"
            await post(served, "/v1/responses", go_on | {"input": "Go on."})
            assert WORD in served.prompt_of()
    finally:
        config.write_text(before)
    async with serve(data_dir=str(data)) as served:
        await post(served, "/v1/responses", body)


async def test_a_full_disk_is_said_and_then_it_goes_on(serve: Serve, data: Path) -> None:
    async with serve(data_dir=str(data)) as served:
        disk = served.app.state.conversations._disk

        async def limit(num_pages: int) -> None:
            sql = f"PRAGMA max_page_count = {num_pages}"
            await disk.run(lambda connection: connection.execute(sql).fetchone())

        await post(served, "/v1/conversations", {})
        await limit(1)
        items = [{"role": "user", "content": "x" * 100_000}]
        refused = await served.http.post("/v1/conversations", json={"items": items})
        assert refused.status_code == 503
        error = refused.json()["error"]
        assert error["code"] == "session_store_unavailable"
        assert "the disk is full" in error["message"]
        health = (await served.http.get("/health")).json()
        assert health["status"] == "degraded"
        assert health["disk"] == {"state": "full", "message": "the disk is full"}
        await post(
            served,
            "/v1/chat/completions",
            {
                "model": "tiny",
                "messages": [{"role": "user", "content": "what is not stored goes on"}],
            },
        )
        await limit(1 << 30)
        await post(served, "/v1/conversations", {"items": items})
