"""Adapters are models: listed, loaded, unloaded, and limited to tenants."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.engine.lora import patterns
from penstock.engine.lora.files import CONFIG_FILE, WEIGHTS_FILE
from penstock.engine.request import Adapter

from ...redis_server import RedisServer
from ..conftest import PATIENCE_S, Serve, Served, until

GIVEN = {"info": {"adapters": (Adapter(name="given", path="/given", digest="1"),)}}
COMPLETION = {"prompt": "hello", "max_tokens": 4}
KEYS = """
keys = [{ key = "of-one", tenant = "one" }, { key = "of-two", tenant = "two" }]
tenants.one = { adapters = ["given"] }
tenants.two = {}
"""


@pytest.fixture
def adapter_path(tmp_path: Path) -> Path:
    """A directory that looks like an adapter's as long as nobody reads the matrices."""
    path = tmp_path / "adapter"
    path.mkdir()
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
    (path / CONFIG_FILE).write_text(json.dumps(config))
    (path / WEIGHTS_FILE).write_bytes(b"matrices")
    return path


async def load(http: httpx.AsyncClient, name: str, path: Path, **more: Any) -> httpx.Response:
    body = {"lora_name": name, "lora_path": str(path), **more}
    return await http.post("/v1/load_lora_adapter", json=body)


async def unload(http: httpx.AsyncClient, name: str) -> httpx.Response:
    return await http.post("/v1/unload_lora_adapter", json={"lora_name": name})


async def complete(served: Served, model: str, **headers: str) -> httpx.Response:
    body = {"model": model, **COMPLETION}
    return await served.http.post("/v1/completions", json=body, headers=headers)


async def names(http: httpx.AsyncClient, **headers: str) -> list[str]:
    found = (await http.get("/v1/models", headers=headers)).json()
    return [card["id"] for card in found["data"]]


def error_of(response: httpx.Response) -> tuple[int, str | None, str | None]:
    error = response.json()["error"]
    return response.status_code, error["code"], error["param"]


async def test_a_pattern_that_does_not_end_is_refused_in_the_answer(
    serve: Serve, adapter_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patterns, "MAX_CPU_S", 0.3)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    header = json.dumps({name: {"dtype": "F32", "shape": [0, 4], "data_offsets": [0, 0]}}).encode()
    (adapter_path / WEIGHTS_FILE).write_bytes(len(header).to_bytes(8, "little") + header)
    config = json.loads((adapter_path / CONFIG_FILE).read_text())
    config["target_modules"] = "([a-z._0-9]+)+X"
    (adapter_path / CONFIG_FILE).write_text(json.dumps(config))
    async with serve(enable_lora=True, **GIVEN) as served:
        refused = await load(served.http, "mine", adapter_path)
        assert error_of(refused) == (400, "invalid_value", "lora_path")
        assert "target_modules: matching takes more than" in refused.json()["error"]["message"]
        assert await names(served.http) == ["tiny", "given"]
        assert not served.engine.submitted


async def test_a_file_that_no_adapter_of_the_model_can_have_is_not_hashed(
    serve: Serve, adapter_path: Path
) -> None:
    with (adapter_path / WEIGHTS_FILE).open("r+b") as file:
        file.truncate(30 << 30)  # sparse
    given = {"info": {**GIVEN["info"], "max_adapter_bytes": 1 << 20}}
    async with serve(enable_lora=True, **given) as served:
        refused = await load(served.http, "mine", adapter_path)
        assert error_of(refused) == (400, "invalid_value", "lora_path")
        assert "bytes, more than 1,048,576" in refused.json()["error"]["message"]


async def test_an_adapter_is_a_model(serve: Serve, adapter_path: Path) -> None:
    async with serve(enable_lora=True, **GIVEN) as served:
        assert await names(served.http) == ["tiny", "given"]
        loaded = await load(served.http, "mine", adapter_path)
        assert (loaded.status_code, loaded.text) == (
            200,
            "Success: LoRA adapter 'mine' added successfully.",
        )
        [trial] = served.engine.submitted.values()  # reads it
        assert trial.adapter is not None
        assert (trial.adapter.name, trial.sampling_params.max_tokens) == ("mine", 0)
        assert await names(served.http) == ["tiny", "given", "mine"]
        card = (await served.http.get("/v1/models/mine")).json()
        assert (card["parent"], card["root"]) == ("tiny", "tiny")
        assert "parent" not in (await served.http.get("/v1/models/tiny")).json()
        answer = await complete(served, "mine")
        assert answer.json()["model"] == "mine"
        chat = await served.client.chat.completions.create(
            model="given", messages=[{"role": "user", "content": "x"}], max_tokens=2
        )
        assert chat.model == "given"
        response = await served.client.responses.create(model="mine", input="x")
        assert response.model == "mine"
        await complete(served, "tiny")
        adapters = [each.adapter for each in served.engine.submitted.values()]
        assert adapters[1:] == [trial.adapter, GIVEN["info"]["adapters"][0], trial.adapter, None]
        await served.client.responses.delete(response.id)
        await until(lambda: len(served.engine.dropped) == 1)
        assert served.engine.dropped[0].adapter == trial.adapter.digest
        removed = await unload(served.http, "mine")
        assert removed.text == "Success: LoRA adapter 'mine' removed successfully."
        await until(lambda: served.engine.unloaded == ["mine"])
        assert error_of(await complete(served, "mine")) == (404, "model_not_found", "model")
        assert (await unload(served.http, "given")).status_code == 200
        assert await names(served.http) == ["tiny"]


async def test_replacing_needs_to_be_asked_for(serve: Serve, adapter_path: Path) -> None:
    async with serve(enable_lora=True) as served:
        await load(served.http, "mine", adapter_path)
        again = await load(served.http, "mine", adapter_path)
        assert error_of(again) == (400, "invalid_value", "lora_name")
        (adapter_path / WEIGHTS_FILE).write_bytes(b"other matrices")
        assert (await load(served.http, "mine", adapter_path, load_inplace=True)).is_success
        await complete(served, "mine")
        first, *_, last = (each.adapter for each in served.engine.submitted.values())
        assert first is not None
        assert last is not None
        assert (first.name, first.path) == (last.name, last.path)
        assert first.digest != last.digest


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"lora_name": "x"}, (400, "missing_required_parameter", "lora_path")),
        ({"lora_name": "x", "lora_path": "/nowhere"}, (400, "invalid_value", "lora_path")),
        ({"lora_name": "tiny", "lora_path": "/x"}, (400, "invalid_value", "lora_name")),
        ({"lora_name": "a b", "lora_path": "/x"}, (400, "invalid_value", "lora_name")),
    ],
)
async def test_what_cannot_be_loaded(
    serve: Serve, body: dict[str, str], expected: tuple[int, str, str]
) -> None:
    async with serve(enable_lora=True) as served:
        response = await served.http.post("/v1/load_lora_adapter", json=body)
        assert error_of(response) == expected
        assert error_of(await unload(served.http, "x")) == (404, "model_not_found", "model")
        assert error_of(await unload(served.http, "tiny")) == (400, "invalid_value", "lora_name")


async def test_what_the_engine_refuses_gets_no_name(serve: Serve, adapter_path: Path) -> None:
    async with serve(enable_lora=True) as served:
        served.engine.refusal = "tensor q_proj.lora_A.weight has shape [1]"
        refused = await load(served.http, "mine", adapter_path)
        assert error_of(refused) == (400, "invalid_value", "lora_path")
        assert "q_proj.lora_A.weight" in refused.json()["error"]["message"]
        assert await names(served.http) == ["tiny"]


async def test_tenants_have_their_adapters(
    serve: Serve, adapter_path: Path, tmp_path: Path
) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(KEYS)
    one, two = ({"Authorization": f"Bearer of-{name}"} for name in ("one", "two"))
    async with serve(
        enable_lora=True, api_keys=("of-admin",), api_keys_file=str(file), **GIVEN
    ) as served:
        await load(served.http, "mine", adapter_path)
        assert await names(served.http, **one) == ["tiny", "given"]
        assert await names(served.http, **two) == ["tiny", "given", "mine"]
        refused = await complete(served, "mine", **one)
        assert error_of(refused) == (404, "model_not_found", "model")
        assert "mine" not in refused.json()["error"]["message"].partition(";")[2]
        assert (await complete(served, "given", **one)).is_success
        assert (await complete(served, "mine", **two)).is_success
        body = {"lora_name": "x", "lora_path": str(adapter_path)}
        for path in ("load", "unload"):
            response = await served.http.post(f"/v1/{path}_lora_adapter", json=body, headers=two)
            assert error_of(response) == (403, "permission_denied", None)


async def test_any_name_is_no_way_to_an_adapter_of_others(
    serve: Serve, adapter_path: Path, tmp_path: Path
) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(KEYS)
    one, two = ({"Authorization": f"Bearer of-{name}"} for name in ("one", "two"))
    settings = {"served_model_names": ("tiny", "*"), "api_keys": ("of-admin",), **GIVEN}
    async with serve(enable_lora=True, api_keys_file=str(file), **settings) as served:
        await load(served.http, "mine", adapter_path)
        assert error_of(await complete(served, "mine", **one)) == (404, "model_not_found", "model")
        for model, headers in (("gpt-4o", one), ("given", one), ("mine", two)):
            assert (await complete(served, model, **headers)).is_success
        used = [each.adapter for each in served.engine.submitted.values()]
        assert [each and each.name for each in used[-3:]] == [None, "given", "mine"]


async def test_each_administrative_call_is_in_the_audit_log(
    serve: Serve, adapter_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(KEYS)
    stranger = {"Authorization": "Bearer of-two"}
    caplog.set_level("INFO", "penstock.audit")
    async with serve(enable_lora=True, api_keys=("of-admin",), api_keys_file=str(file)) as served:
        await load(served.http, "mine", adapter_path)
        await load(served.http, "mine", adapter_path)
        await unload(served.http, "mine")
        body = {"lora_name": "x", "lora_path": "/x\nforged"}
        await served.http.post("/v1/load_lora_adapter", json=body, headers=stranger)
        await served.http.post("/v1/load_lora_adapter", json=body)
        served.engine.may_speak.clear()
        earlier = len(served.engine.submitted)
        asking = asyncio.create_task(complete(served, "tiny", Authorization="Bearer of-one"))
        await until(lambda: len(served.engine.submitted) > earlier)
        [running] = (await served.http.get("/v1/requests")).json()["data"]
        await served.http.post(f"/v1/requests/{running['id']}/cancel")
        served.engine.may_speak.set()
        await asyncio.wait_for(asking, PATIENCE_S)
    lines = [vars(line) for line in caplog.records if line.name == "penstock.audit"]
    assert [(line["action"], line.get("lora_name"), line["outcome"]) for line in lines] == [
        ("load_lora_adapter", "mine", "done"),
        ("load_lora_adapter", "mine", "invalid_value"),
        ("unload_lora_adapter", "mine", "done"),
        ("load_lora_adapter", None, "permission_denied"),
        ("load_lora_adapter", "x", "invalid_value"),
        ("cancel_request", None, "done"),
    ]
    assert (lines[-1]["cancelled_id"], lines[-1]["cancelled_tenant"]) == (running["id"], "one")
    assert lines[0]["lora_path"] == str(adapter_path)
    assert len({line["key_id"] for line in lines}) == 2
    assert all("\n" not in line["message"] and "of-admin" not in str(line) for line in lines)


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/embeddings", {"input": "a"}),
        ("/rerank", {"query": "q", "documents": ["a"]}),
        ("/score", {"text_1": "q", "text_2": "a"}),
    ],
)
async def test_an_adapter_makes_vectors_and_scores(
    serve: Serve, route: str, body: dict[str, Any]
) -> None:
    async with serve(enable_lora=True, **GIVEN) as served:
        answer = await served.http.post(route, json={"model": "given", **body})
        assert answer.json()["model"] == "given"
        submitted = list(served.engine.submitted.values())
        assert submitted
        assert {each.adapter and each.adapter.name for each in submitted} == {"given"}
        refused = await served.http.post("/classify", json={"model": "given", "input": "a"})
        assert error_of(refused) == (400, "invalid_value", "model")
        unknown = await served.http.post(route, json={"model": "other", **body})
        assert error_of(unknown) == (404, "model_not_found", "model")
        assert (await served.http.post(route, json={"model": "tiny", **body})).is_success


async def test_without_adapters_there_are_no_routes(served: Served) -> None:
    response = await served.http.post("/v1/load_lora_adapter", json={})
    assert response.status_code == 404


@pytest.mark.redis
async def test_gateways_of_one_server_agree(
    serve: Serve, adapter_path: Path, shared_server: RedisServer
) -> None:
    settings = {"enable_lora": True, "redis_url": shared_server.url, **GIVEN}
    async with serve(**settings) as first, serve(**settings) as second:
        pass_on = {"model": "mine", **COMPLETION}
        assert (await load(first.http, "mine", adapter_path)).is_success
        answer = await second.http.post("/v1/completions", json=pass_on)  # at once
        assert answer.is_success
        assert (await unload(first.http, "given")).is_success
        async with asyncio.timeout(PATIENCE_S):
            while await names(second.http) != ["tiny", "mine"]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
