"""The Conversations API, with the stock client and on the wire."""

from __future__ import annotations

import itertools
import types
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.conversations import (
    Conversation,
    ConversationDeletedResource,
    ConversationItem,
    ConversationItemList,
)
from pydantic import TypeAdapter

from tests.support.tiers import tiered

from ...redis_server import RedisServer
from ..conftest import ANSWER, Serve, Served

ITEM: TypeAdapter[Any] = TypeAdapter(ConversationItem)
URL = "/v1/conversations"


@pytest.fixture(params=["memory", "disk", pytest.param("redis", marks=pytest.mark.redis)])
async def served(
    serve: Serve, request: pytest.FixtureRequest, patient_logs: None, tmp_path: Path
) -> AsyncIterator[Served]:
    """A gateway with each of the stores, empty."""
    settings = {"data_dir": f"{tmp_path}/data" if request.param == "disk" else "none"}
    if request.param == "redis":
        server: RedisServer = request.getfixturevalue("redis_server")
        settings["redis_url"] = server.patient_url
    async with serve(**settings) as served:
        yield served


def says(text: str, role: str = "user") -> Any:
    return {"type": "message", "role": role, "content": text}


def texts(items: Any) -> list[str]:
    return [item.content[0].text for item in items]


async def make(served: Served, *contents: str) -> str:
    """A conversation with a turn for each text."""
    conversation = await served.client.conversations.create(metadata={"title": "t"})
    for content in contents:
        await served.client.conversations.items.create(conversation.id, items=[says(content)])
    return conversation.id


async def tree(served: Served, conversation_id: str) -> dict[str, Any]:
    response = await served.http.get(f"{URL}/{conversation_id}/tree")
    assert response.status_code == 200
    return dict(response.json())


async def test_create_retrieve_update_delete(served: Served) -> None:
    conversations = served.client.conversations
    made = await conversations.create(metadata={"title": "hello"})
    assert made.id.startswith("conv_")
    assert made.metadata == {"title": "hello"}
    assert await conversations.retrieve(made.id) == made
    updated = await conversations.update(made.id, metadata={"title": "bye", "k": "v"})
    assert updated.metadata == {"title": "bye", "k": "v"}
    assert (await conversations.update(made.id, metadata=None)).metadata == {}
    deleted = await conversations.delete(made.id)
    assert (deleted.id, deleted.deleted) == (made.id, True)
    for call in (conversations.retrieve, conversations.delete, conversations.items.list):
        with pytest.raises(openai.NotFoundError):
            await call(made.id)


async def test_items(served: Served) -> None:
    conversations = served.client.conversations
    parts: Any = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    made = await conversations.create(
        items=[
            {"type": "message", "role": "developer", "content": parts},
            says("one"),
            says("two", "assistant"),
        ]
    )
    added = await conversations.items.create(made.id, items=[says("three")])
    assert texts(added.data) == ["three"]
    assert (added.first_id, added.has_more) == (added.last_id, False)
    listed = [item async for item in conversations.items.list(made.id, order="asc")]
    assert texts(listed) == ["a", "one", "two", "three"]
    assert [part.text for part in listed[0].content] == ["a", "b"]
    kinds = [item.content[0].type for item in listed]
    assert kinds == ["input_text", "input_text", "output_text", "input_text"]
    assert len({item.id for item in listed}) == 4
    one = await conversations.items.retrieve(listed[1].id, conversation_id=made.id)
    assert one == listed[1]
    await conversations.items.delete(listed[1].id, conversation_id=made.id)
    newest_first = [item async for item in conversations.items.list(made.id)]
    assert texts(newest_first) == ["three", "two", "a"]
    with pytest.raises(openai.NotFoundError) as caught:
        await conversations.items.retrieve(listed[1].id, conversation_id=made.id)
    assert caught.value.code == "item_not_found"


async def test_an_item_given_with_an_id_gets_one_of_its_own(served: Served) -> None:
    item = {**says("x", "assistant"), "id": "msg_1", "status": "incomplete"}
    made = await served.client.conversations.create(items=[item, item])
    listed = [item async for item in served.client.conversations.items.list(made.id)]
    assert len({"msg_1", *(item.id for item in listed)}) == 3
    assert [item.status for item in listed] == ["incomplete", "incomplete"]


@pytest.mark.parametrize("order", ["asc", "desc"])
async def test_items_are_paged(served: Served, order: Any) -> None:
    made = await make(served, *"abcde")
    page = await served.client.conversations.items.list(made, limit=2, order=order)
    sizes = [len(page.data)]
    seen = list(page.data)
    while page.has_next_page():
        page = await page.get_next_page()
        sizes.append(len(page.data))
        seen += page.data
    assert sizes == [2, 2, 1]
    assert texts(seen) == sorted("abcde", reverse=order == "desc")


async def test_every_object_is_as_openai_has_it(served: Served) -> None:
    created = await served.http.post(URL, json={"items": [says("one"), says("two", "assistant")]})
    url = f"{URL}/{created.json()['id']}"
    Conversation.model_validate_json(created.content, strict=True)
    Conversation.model_validate_json((await served.http.get(url)).content, strict=True)
    items = await served.http.get(f"{url}/items")
    ConversationItemList.model_validate_json(items.content, strict=True)
    item_url = f"{url}/items/{items.json()['last_id']}"
    ITEM.validate_json((await served.http.get(item_url)).content, strict=True)
    added = await served.http.post(f"{url}/items", json={"items": [says("three")]})
    ConversationItemList.model_validate_json(added.content, strict=True)
    Conversation.model_validate_json((await served.http.delete(item_url)).content, strict=True)
    empty = await served.http.get(f"{url}/items", params={"after": items.json()["last_id"]})
    assert empty.status_code == 404  # it was deleted
    deleted = await served.http.delete(url)
    ConversationDeletedResource.model_validate_json(deleted.content, strict=True)
    fresh = (await served.http.post(URL, json={})).json()["id"]
    none = await served.http.get(f"{URL}/{fresh}/items")
    assert none.json()["data"] == []
    ConversationItemList.model_validate_json(none.content, strict=True)


async def test_the_list_of_conversations(served: Served) -> None:
    made = [await served.client.conversations.create(metadata={"title": t}) for t in "abcde"]
    await served.client.responses.create(model="tiny", input="a conversation that no list shows")
    # Those of one second are in the order of their ids.
    made.sort(key=lambda conversation: (conversation.created_at, conversation.id))
    ids = [conversation.id for conversation in made]
    first = (await served.http.get(URL, params={"limit": 3})).json()
    assert [item["id"] for item in first["data"]] == ids[:1:-1]
    assert first["data"][0] == made[-1].to_dict()
    assert first["has_more"] is True
    rest = (await served.http.get(URL, params={"after": first["last_id"]})).json()
    assert [item["id"] for item in rest["data"]] == ids[1::-1]
    assert rest["has_more"] is False
    asc = (await served.http.get(URL, params={"order": "asc", "limit": 1})).json()
    assert asc["data"][0]["id"] == ids[0]
    assert (await served.http.get(URL, params={"after": "conv_0"})).status_code == 404


async def test_the_list_tells_where_conversations_are(
    served: Served, request: pytest.FixtureRequest
) -> None:
    listed = (await served.http.get(URL)).json()
    store = request.node.callspec.params["served"]
    assert listed["penstock"] == {"store": store, "durable": store != "memory"}


async def test_what_was_dropped_is_told(serve: Serve, tmp_path: Path) -> None:
    async with serve(data_dir=str(tmp_path), session_store_bytes=20_000) as served:
        for _ in range(5):
            await make(served, "x" * 5000)
        await served.app.state.conversations.erased()
        listed = (await served.http.get(URL)).json()
        assert listed["penstock"]["num_dropped"] == 5 - len(listed["data"]) > 0
        assert listed["penstock"]["dropped_at"] >= listed["data"][-1]["created_at"]


async def test_pins(served: Served) -> None:
    made = [await make(served, text) for text in "abc"]
    one = f"{URL}/{made[1]}"
    pinned = (await served.http.post(one, json={"pinned": True})).json()
    assert pinned["pinned"] is True
    assert pinned["metadata"] == {"title": "t"}  # as it was
    for filtered, ids in (("true", [made[1]]), ("false", [made[2], made[0]])):
        listed = (await served.http.get(URL, params={"pinned": filtered})).json()
        assert {item["id"] for item in listed["data"]} == set(ids)
    renamed = (await served.http.post(one, json={"metadata": {"title": "new"}})).json()
    assert renamed["pinned"] is True
    unpinned = (await served.http.post(one, json={"pinned": False, "metadata": {}})).json()
    assert "pinned" not in unpinned
    assert unpinned["metadata"] == {}
    nothing = await served.http.post(one, json={})
    assert nothing.status_code == 400
    assert nothing.json()["error"]["param"] == "metadata"


async def test_search(served: Served, request: pytest.FixtureRequest) -> None:
    first = await make(served, "a gooseberry fool", "and more")
    second = await make(served, "Gooseberries, please")
    await make(served, "something else")
    found = await served.http.get(f"{URL}/search", params={"query": "gooseb"})
    if request.node.callspec.params["served"] == "redis":
        assert found.status_code == 501
        assert found.json()["error"]["code"] == "search_not_supported"
        return
    assert found.status_code == 200, found.text
    hits = found.json()["data"]
    assert {hit["conversation"]["id"] for hit in hits} == {first, second}
    turns = {
        turn["turn"] for each in (first, second) for turn in (await tree(served, each))["data"]
    }
    assert all(hit["turn"] in turns and "gooseb" in hit["excerpt"].lower() for hit in hits)
    page = {"query": "gooseb", "limit": 1, "offset": 1}
    rest = (await served.http.get(f"{URL}/search", params=page)).json()
    assert rest["data"] == hits[1:]
    assert rest["has_more"] is False
    for query in ({}, {"query": ""}, {"query": "a", "offset": -1}, {"query": "x" * 1001}):
        refused = await served.http.get(f"{URL}/search", params=query)
        assert refused.status_code == 400


async def test_the_tree_and_its_head(served: Served) -> None:
    made = await make(served, "root", "left")
    grown = await tree(served, made)
    root, left = (turn["turn"] for turn in grown["data"])
    assert grown["head"] == left
    assert [turn["parent"] for turn in grown["data"]] == [None, root]
    assert {turn["response_id"] for turn in grown["data"]} == {None}
    assert {turn["status"] for turn in grown["data"]} == {"completed"}
    moved = await served.http.post(f"{URL}/{made}/head", json={"turn": root, "expected": left})
    assert moved.json()["turn"] == root
    await served.client.conversations.items.create(made, items=[says("right")])
    listed = [item async for item in served.client.conversations.items.list(made)]
    assert texts(listed) == ["right", "root"]
    assert [turn["parent"] for turn in (await tree(served, made))["data"]] == [None, root, root]
    again = await served.http.post(f"{URL}/{made}/head", json={"turn": left, "expected": root})
    assert again.status_code == 409
    assert again.json()["error"]["code"] == "conversation_locked"
    assert again.headers["x-should-retry"] == "false"


async def test_the_tree_with_what_was_said_on_the_way_to_its_head(served: Served) -> None:
    made = await make(served, "root", "left")
    root, left = (turn["turn"] for turn in (await tree(served, made))["data"])
    await served.http.post(f"{URL}/{made}/head", json={"turn": root, "expected": left})
    body = {"model": "tiny", "input": "right", "conversation": made}
    answered = (await served.http.post("/v1/responses", json=body)).json()
    response = await served.http.get(f"{URL}/{made}/tree", params={"items": "true"})
    first, beside, last = response.json()["data"]
    assert [item["content"][0]["text"] for item in first["items"]] == ["root"]
    assert first["output"] is None
    assert "items" not in beside
    assert [item["content"][0]["text"] for item in last["items"]] == ["right"]
    assert last["output"] == answered["output"][0]
    whole = await served.http.get(f"{URL}/{made}/tree", params={"items": "all"})
    assert all(turn["items"] for turn in whole.json()["data"])  # off the way, too
    await served.http.post("/v1/responses", json=body | {"input": "on"})
    await served.http.delete(f"/v1/responses/{answered['id']}")
    whole = await served.http.get(f"{URL}/{made}/tree", params={"items": "all"})
    told = [turn["items"][0]["content"][0]["text"] for turn in whole.json()["data"]]
    assert told == ["root", "left", "on"]  # behind what was deleted, too
    wrong = await served.http.get(f"{URL}/{made}/tree", params={"items": "some"})
    assert wrong.status_code == 400
    assert wrong.json()["error"]["param"] == "items"


async def test_a_head_is_a_turn_of_the_conversation(served: Served) -> None:
    made, other = await make(served, "a"), await make(served, "b")
    head = (await tree(served, made))["head"]
    stranger = (await tree(served, other))["head"]
    for turn in (stranger, "turn_0"):
        body = {"turn": turn, "expected": head}
        response = await served.http.post(f"{URL}/{made}/head", json=body)
        assert response.status_code == 404
    assert (await tree(served, made))["head"] == head
    emptied = await served.http.post(f"{URL}/{made}/head", json={"turn": None, "expected": head})
    assert emptied.status_code == 200
    assert [item async for item in served.client.conversations.items.list(made)] == []


async def test_a_response_is_a_turn(served: Served) -> None:
    made = await make(served, "before")
    response = await served.client.responses.create(model="tiny", input="now", conversation=made)
    assert served.prompt_of() == "<user>before\n<user>now\n<assistant>"
    grown = await tree(served, made)
    assert grown["head"] == response.id == grown["data"][-1]["response_id"]
    listed = [item async for item in served.client.conversations.items.list(made, order="asc")]
    assert texts(listed) == ["before", "now", response.output_text]
    said = listed[-1]
    assert said.id == response.output[0].id
    await served.client.conversations.items.delete(said.id, conversation_id=made)
    await served.client.responses.create(model="tiny", input="then", conversation=made)
    assert served.prompt_of() == "<user>before\n<user>now\n<user>then\n<assistant>"


async def test_the_turns_after_a_deleted_one_go_on_without_it(served: Served) -> None:
    made, other = await make(served, "before"), await make(served, "elsewhere")
    turns = []
    for said in ("one", "two", "three"):
        answer = await served.client.responses.create(model="tiny", input=said, conversation=made)
        turns.append(answer.id)
    stranger = (await tree(served, other))["head"]
    for wrong in (stranger, "turn_0", made):
        refused = await served.http.delete(f"{URL}/{made}/turns/{wrong}")
        assert refused.status_code == 404
    deleted = await served.http.delete(f"{URL}/{made}/turns/{turns[1]}")
    assert (deleted.status_code, deleted.json()["id"]) == (200, made)
    left = await tree(served, made)
    assert left["head"] == turns[2]
    shown = [(turn["turn"], turn["parent"]) for turn in left["data"][1:]]
    assert shown == [(turns[0], left["data"][0]["turn"]), (turns[2], turns[0])]
    await served.client.responses.create(model="tiny", input="four", conversation=made)
    said = [line for line in served.prompt_of().splitlines() if line.startswith("<user>")]
    assert said == ["<user>before", "<user>one", "<user>three", "<user>four"]
    assert (await served.http.get(f"/v1/responses/{turns[1]}")).status_code == 404


async def test_a_running_turn_holds_the_head(serve: Serve) -> None:
    async with serve(step_s=3600.0) as served:  # one token, and silence
        made = await make(served, "before")
        head = (await tree(served, made))["head"]
        running = await served.client.responses.create(
            model="tiny",
            input="now",
            conversation=made,
            background=True,
            extra_body={"ignore_eos": True},
        )
        grown = await tree(served, made)
        assert (grown["head"], grown["running"]) == (head, running.id)
        assert [turn["status"] for turn in grown["data"]] == ["completed", "in_progress"]
        with pytest.raises(openai.ConflictError) as locked:
            await served.client.conversations.items.create(made, items=[says("me too")])
        assert locked.value.code == "conversation_locked"
        assert locked.value.response.headers["x-should-retry"] == "false"
        moved = await served.http.post(f"{URL}/{made}/head", json={"turn": None, "expected": head})
        assert moved.status_code == 409
        deleted = await served.http.delete(f"{URL}/{made}/turns/{head}")
        assert (deleted.status_code, deleted.json()["error"]["code"]) == (409, locked.value.code)
        listed = [item async for item in served.client.conversations.items.list(made)]
        assert texts(listed) == ["before"]
        await served.client.responses.cancel(running.id)
        grown = await tree(served, made)
        assert (grown["head"], grown["running"]) == (running.id, None)
        assert grown["data"][-1]["status"] == "cancelled"


async def test_a_deleted_conversation_takes_its_responses_with_it(serve: Serve) -> None:
    async with serve() as served:
        responses, made = served.client.responses, await make(served)
        ended = await responses.create(model="tiny", input="one", conversation=made)
        served.engine.may_speak.clear()  # the next one does not end by itself
        running = await responses.create(
            model="tiny", input="two", conversation=made, background=True
        )
        await served.submitted(2)
        assert (await served.http.delete(f"{URL}/{made}")).status_code == 200
        await served.aborted()
        for query in ("", "?stream=true"):
            gone = await served.http.get(f"/v1/responses/{ended.id}{query}")
            assert gone.status_code == 404, query
        assert (await served.http.get(f"/v1/responses/{running.id}")).status_code == 404


async def test_items_as_the_stock_client_lists_them_come_in_again(served: Served) -> None:
    first = await served.client.responses.create(model="tiny", input="one")
    listed = await served.client.responses.input_items.list(first.id)
    said = [item.model_dump() for item in (*listed.data, *first.output)]
    await served.client.responses.create(
        model="tiny", input=[*said, {"role": "user", "content": "two"}]
    )
    assert served.prompt_of() == f"<user>one\n<assistant>{ANSWER}\n<user>two\n<assistant>"


async def test_logprobs_of_items_are_shown_on_request(served: Served) -> None:
    made = await make(served)
    include: Any = ["message.output_text.logprobs"]
    await served.client.responses.create(
        model="tiny", input="a", conversation=made, include=include
    )
    items = served.client.conversations.items
    [plain, *_] = (await items.list(made)).data
    assert plain.content[0].logprobs == []
    [full, *_] = (await items.list(made, include=include)).data
    assert len(full.content[0].logprobs) == len(served.engine.script)
    one = await items.retrieve(plain.id, conversation_id=made, include=include)
    assert one == full


async def test_what_belongs_to_another_tenant_is_not_there(serve: Serve, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(
        '[[keys]]\nkey = "sk-a"\ntenant = "a"\n[[keys]]\nkey = "sk-b"\ntenant = "b"\n'
        "[tenants.a]\n[tenants.b]\n"
    )
    async with serve(api_keys_file=str(keys)) as served:
        a, b = (
            served.client.with_options(api_key="sk-a"),
            served.client.with_options(api_key="sk-b"),
        )
        made = await a.conversations.create(items=[says("secret")])
        [item] = [item async for item in a.conversations.items.list(made.id)]
        listed = {}
        for key in ("sk-a", "sk-b"):
            headers = {"Authorization": f"Bearer {key}"}
            listed[key] = (await served.http.get(URL, headers=headers)).json()["data"]
        assert [len(data) for data in listed.values()] == [1, 0]
        stranger = b.conversations
        for call in (
            stranger.retrieve(made.id),
            stranger.update(made.id, metadata={}),
            stranger.delete(made.id),
            stranger.items.list(made.id),
            stranger.items.create(made.id, items=[says("x")]),
            stranger.items.retrieve(item.id, conversation_id=made.id),
            stranger.items.delete(item.id, conversation_id=made.id),
            b.responses.create(model="tiny", input="x", conversation=made.id),
        ):
            with pytest.raises(openai.NotFoundError):
                await call
        assert (await a.conversations.retrieve(made.id)).metadata == {}


BAD: list[tuple[str, str, Any, str, str | None]] = [
    ("POST", "", [], "invalid_json", None),
    ("POST", "", {"x": 1}, "unknown_parameter", "x"),
    ("POST", "", {"items": [says("x")] * 21}, "invalid_value", "items"),
    ("POST", "", {"items": [says("x", "boss")]}, "invalid_value", "items[0].role"),
    (
        "POST",
        "",
        {"items": [{"type": "item_reference", "id": "rs_1"}]},
        "unsupported_parameter",
        "items[0]",
    ),
    ("POST", "", {"metadata": {"k" * 65: "v"}}, "invalid_value", f"metadata.{'k' * 65}"),
    ("POST", "", {"metadata": {"k": "v" * 513}}, "invalid_value", "metadata.k"),
    ("POST", "", {"metadata": {"k": 1}}, "invalid_type", "metadata.k"),
    (
        "POST",
        "",
        {"metadata": dict.fromkeys("abcdefghijklmnopq", "")},
        "invalid_value",
        "metadata",
    ),
    ("POST", "/{id}", {}, "missing_required_parameter", "metadata"),
    ("POST", "/{id}/items", {}, "missing_required_parameter", "items"),
    ("POST", "/{id}/items", {"items": []}, "invalid_value", "items"),
    ("GET", "/{id}/items?limit=0", None, "invalid_value", "limit"),
    ("GET", "/{id}/items?limit=101", None, "invalid_value", "limit"),
    ("GET", "/{id}/items?limit=x", None, "invalid_value", "limit"),
    ("GET", "/{id}/items?order=up", None, "invalid_value", "order"),
    ("GET", "/{id}/items?include=x", None, "invalid_value", "include[0]"),
    ("GET", "/{id}/items?page=2", None, "unknown_parameter", "page"),
    ("GET", "?include=x", None, "unknown_parameter", "include"),
    ("POST", "/{id}/head", {"turn": None}, "missing_required_parameter", "expected"),
    ("POST", "/{id}/head", {"expected": None}, "missing_required_parameter", "turn"),
    ("POST", "/{id}/head", {"turn": 7, "expected": None}, "invalid_type", "turn"),
]


async def test_bad_requests(served: Served) -> None:
    made = await make(served)
    wrong = []
    for method, path, body, code, param in BAD:
        response = await served.http.request(method, URL + path.format(id=made), json=body)
        error = response.json()["error"]
        if (response.status_code, error["code"], error["param"]) != (400, code, param):
            wrong.append((path, body, response.status_code, error))
    assert wrong == []


@pytest.mark.parametrize("conversation_id", ["conv_0", "conv_" + "0" * 24, "resp_1", "%2e%2e", "x"])
async def test_unknown_conversations(served: Served, conversation_id: str) -> None:
    url = f"{URL}/{conversation_id}"
    head = {"turn": None, "expected": None}
    for method, path, body in [
        ("GET", "", None),
        ("POST", "", {"metadata": {}}),
        ("DELETE", "", None),
        ("GET", "/tree", None),
        ("POST", "/head", head),
        ("GET", "/items", None),
        ("POST", "/items", {"items": [says("x")]}),
        ("GET", "/items/msg_1", None),
        ("DELETE", "/items/msg_1", None),
    ]:
        response = await served.http.request(method, url + path, json=body)
        assert (response.status_code, method + path) == (404, method + path)
        assert response.json()["error"]["message"]


KEYS = (
    '[[keys]]\nkey = "sk-a"\ntenant = "a"\n[[keys]]\nkey = "sk-b"\ntenant = "b"\n'
    "[tenants.a]\n{}\n[tenants.b]\n"
)


def of(served: Served, key: str) -> openai.AsyncOpenAI:
    return served.client.with_options(api_key=key)


async def test_what_stores_counts_against_the_rate_limit(serve: Serve, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(KEYS.format("requests_per_minute = 3"))
    async with serve(api_keys_file=str(keys)) as served:
        a = of(served, "sk-a").conversations
        made = await a.create(items=[says("x")])
        await a.items.create(made.id, items=[says("y")])
        await a.update(made.id, metadata={"a": "b"})
        for call in (
            a.create(),
            a.items.create(made.id, items=[says("z")]),
            a.update(made.id, metadata={}),
        ):
            with pytest.raises(openai.RateLimitError) as caught:
                await call
            assert caught.value.code == "rate_limit_exceeded"
            assert 0 < int(caught.value.response.headers["retry-after-ms"]) <= 120_000
        assert (await a.retrieve(made.id)).metadata == {"a": "b"}, "what reads costs nothing"
        await of(served, "sk-b").conversations.create()
        await a.delete(made.id)


async def test_one_that_is_created_with_items_is_used_when_it_is_created(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though a second may begin between the two."""
    seconds = map(float, itertools.count(1_800_000_000))
    clock = types.SimpleNamespace(time=lambda: next(seconds))
    monkeypatch.setattr("penstock.gateway.api.conversations.routes.time", clock)
    made = await served.client.conversations.create(items=[says("x")])
    assert await served.client.conversations.retrieve(made.id) == made


@pytest.mark.parametrize("is_in_redis", [False, pytest.param(True, marks=pytest.mark.redis)])
@pytest.mark.parametrize("is_of_file", tiered([False, True], [True]))
async def test_a_flood_of_one_tenant_takes_nothing_from_another(
    serve: Serve,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    patient_logs: None,
    is_in_redis: bool,
    is_of_file: bool,
) -> None:
    """By whatever it stores: conversations, responses and their logs, keyed answers."""
    keys = tmp_path / "keys.toml"
    keys.write_text(KEYS.format("store_bytes = 100_000" if is_of_file else ""))
    settings: dict[str, Any] = {"api_keys_file": str(keys)}
    if not is_of_file:
        settings["tenant_store_bytes"] = 100_000
    if is_in_redis:
        settings["redis_url"] = request.getfixturevalue("redis_server").patient_url
    async with serve(**settings) as served:
        a, b = of(served, "sk-a"), of(served, "sk-b")
        kept = await b.conversations.create(items=[says("kept")])
        said = await b.responses.create(model="tiny", input="kept")
        made = [await a.conversations.create(items=[says("x" * 30_000)]) for _ in range(4)]
        with pytest.raises(openai.NotFoundError):
            await a.conversations.retrieve(made[0].id)
        for number in range(60):
            await a.responses.create(model="tiny", input="x")
            await a.completions.create(
                model="tiny", prompt="x", extra_headers={"Idempotency-Key": str(number)}
            )
        with pytest.raises(openai.NotFoundError):
            await a.conversations.retrieve(made[3].id)
        with pytest.raises(openai.APIStatusError) as caught:
            await a.conversations.create(items=[says("x" * 120_000)])
        assert (caught.value.status_code, caught.value.code) == (413, "store_limit_exceeded")
        assert await b.conversations.retrieve(kept.id) == kept
        assert (await b.responses.retrieve(said.id)).output_text == said.output_text
