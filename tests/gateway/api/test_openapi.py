"""The document at `/openapi.json`, and the server held against it by schemathesis."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import BaseRoute, Mount, Route

from penstock import gateway
from penstock.engine.config import ModelConfig
from penstock.gateway.api.chat.schema import ChatRequest
from penstock.gateway.api.openapi import ANSWERS, document
from penstock.gateway.api.schema.parameters import ALIASES, UNREAD, Endpoint
from penstock.gateway.api.shared.operations import operations_of
from penstock.gateway.app import create_app
from penstock.gateway.config import GatewayConfig

from ..conftest import Serve, Served

_CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "use_after_free",
)


def _operations(routes: Iterable[BaseRoute], prefix: str = "") -> Iterator[tuple[str, str]]:
    """What is served, as the document names it."""
    for route in routes:
        if isinstance(route, Mount):
            yield from _operations(route.routes, prefix + route.path)
        elif isinstance(route, Route):
            for method in (route.methods or set()) - {"HEAD"}:
                yield method.lower(), prefix + route.path.replace(":path", "")


async def test_every_route_is_described(model_path: Path, tmp_path: Path) -> None:
    model = ModelConfig(model=str(model_path))
    app = create_app(GatewayConfig(engine_address=f"{tmp_path}/engine.sock", model=model))
    async with app.router.lifespan_context(app):
        served = set(_operations(app.routes))
    paths = document(["tiny"], operations_of(app.routes))["paths"]
    upgrades = {("get", "/v1/responses"), ("get", "/v1/stats")}  # WebSockets
    described = {(method, path) for path, methods in paths.items() for method in methods}
    assert described == served - upgrades


def test_every_endpoint_is_in_the_document_of_the_api(model_path: Path, tmp_path: Path) -> None:
    model = ModelConfig(model=str(model_path))
    app = create_app(GatewayConfig(engine_address=f"{tmp_path}/engine.sock", model=model))
    text = Path(gateway.__file__).with_name("API.md").read_text("utf-8")
    told = set(re.findall(r"`(?:POST )?(…?/[^`]*)`", text.partition("\n## ")[0]))
    paths = document(["tiny"], operations_of(app.routes))["paths"]
    parts = {path: {path, f"…/{path.rpartition('/')[2]}"} for path in paths}
    assert [path for path in paths if told.isdisjoint(parts[path])] == []


async def test_a_parameter_is_described_as_it_is_taken(served: Served) -> None:
    answer = await served.http.get("/openapi.json")
    assert answer.headers["content-type"] == "application/json"
    chat = answer.json()["components"]["schemas"]["ChatRequest"]
    names = ChatRequest.model_fields.keys() | UNREAD[Endpoint.CHAT].keys()
    names |= ALIASES[Endpoint.CHAT].keys()
    assert chat["properties"].keys() == names
    assert chat["properties"]["model"] == {"enum": ["tiny", None]}
    assert chat["properties"]["functions"]["enum"] == [None, []]
    assert chat["required"] == ["messages"]


def test_what_follows_from_an_answer_is_linked(model_path: Path, tmp_path: Path) -> None:
    model = ModelConfig(model=str(model_path))
    app = create_app(GatewayConfig(engine_address=f"{tmp_path}/engine.sock", model=model))
    paths = document(["tiny"], operations_of(app.routes))["paths"]
    links = {name: _linked(operation) for name, operation in _described(paths)}
    assert links["post /v1/responses"] == {
        "get /v1/responses/{response_id}",
        "delete /v1/responses/{response_id}",
        "post /v1/responses/{response_id}/cancel",
        "post /v1/responses/{response_id}/steer",
        "get /v1/responses/{response_id}/input_items",
        "post /v1/responses",
    }
    assert "post /v1/responses" in links["post /v1/conversations"]
    assert links["post /tokenize"] == {"post /detokenize"}
    everything = set().union(*links.values())
    assert everything >= {name for name, _ in _described(paths) if "{" in name} - {
        "post /v1/requests/{request_id}/cancel"  # its list is empty while nothing runs
    }


def test_items_and_trees_are_described_whole() -> None:
    variants = [each.get("$ref") for each in ANSWERS["Item"]["oneOf"]]
    assert variants == ["#/components/schemas/MessageItem", *[None] * 6]
    turn = ANSWERS["Tree"]["properties"]["data"]["items"]
    assert {"items", "output"} <= turn["properties"].keys() - set(turn["required"])


def _described(paths: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in paths.items():
        for method, operation in methods.items():
            yield f"{method} {path}", operation


def _linked(operation: dict[str, Any]) -> set[str]:
    return {link["operationId"] for link in operation["responses"]["200"]["links"].values()}


async def _held_against_the_document(served: Served, tmp_path: Path, *options: str) -> None:
    process = await asyncio.create_subprocess_exec(
        str(Path(sys.executable).with_name("schemathesis")),
        "run",
        f"http://127.0.0.1:{served.port}/openapi.json",
        f"--checks={','.join(_CHECKS)}",
        *options,
        "--seed=1",
        "--continue-on-failure",
        "--request-timeout=120",
        "--generation-database=none",
        "--suppress-health-check=all",
        "--no-color",
        cwd=tmp_path,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    print(output.decode())
    assert process.returncode == 0


async def test_the_server_does_what_it_says_of_examples(serve: Serve, tmp_path: Path) -> None:
    """A few of all that the tests below try."""
    async with serve(info={"max_model_len": 256}) as served:
        await _held_against_the_document(
            served, tmp_path, "--phases=examples,fuzzing", "--max-examples=1"
        )


@pytest.mark.exhaustive
@pytest.mark.timeout(900)  # minutes, on a busy machine
async def test_the_server_does_what_it_says(serve: Serve, tmp_path: Path) -> None:
    async with serve(info={"max_model_len": 256}) as served:
        await _held_against_the_document(
            served, tmp_path, "--phases=examples,fuzzing", "--max-examples=5"
        )


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
async def test_operations_follow_from_each_other(
    serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Sequences of linked operations, such as create, continue, cancel, delete and retrieve."""
    async with serve(info={"max_model_len": 256}) as served:
        await _held_against_the_document(served, tmp_path, "--phases=stateful", "--max-examples=12")
    for record in caplog.records:
        assert record.exc_info is None
        assert len(record.getMessage()) < 2048


_ITEM = {"type": "message", "role": "user", "content": "Hello"}
_BODIES: dict[str, Any] = {  # of operations that need one which no link gives
    "post /v1/responses": {"input": "Hello"},
    "post /v1/conversations": {},
    "post /v1/conversations/{conversation_id}": {"metadata": {"a": "b"}},
    "post /v1/conversations/{conversation_id}/items": {"items": [_ITEM]},
    "post /v1/conversations/{conversation_id}/head": {"turn": None, "expected": None},
    "post /tokenize": {"prompt": "Hello"},
    "post /v1/responses/{response_id}/steer": {"input": "Hello"},
}


async def test_each_link_leads_to_an_answer(served: Served) -> None:
    paths = (await served.http.get("/openapi.json")).json()["paths"]
    by_name = dict(_described(paths))
    num_links = 0
    for source, operation in by_name.items():
        for link in operation["responses"]["200"]["links"].values():
            # A new source for each, since one of them deletes it.
            in_path: dict[str, str] = {}
            if "{conversation_id}" in source:
                conversation = await served.http.post("/v1/conversations", json={"items": [_ITEM]})
                in_path["conversation_id"] = conversation.json()["id"]
            answer = await _call(served, source, in_path, _BODIES.get(source))
            found = {
                name: _resolved(value, answer, in_path)
                for name, value in link.get("parameters", {}).items()
            }
            target, body = link["operationId"], link.get("requestBody")
            if body is not None:
                body = {name: _resolved(value, answer, in_path) for name, value in body.items()}
            await _call(served, target, found, body or _BODIES.get(target))
            num_links += 1
    assert num_links > 15


async def _call(served: Served, name: str, in_path: dict[str, str], body: Any) -> Any:
    method, path = name.split()
    answer = await served.http.request(method, path.format(**in_path), json=body)
    if name.endswith("/steer"):  # of a response that has ended
        assert answer.json()["error"]["code"] == "response_already_completed"
        return None
    assert answer.status_code == 200, (name, answer.text)
    return answer.json()


def _resolved(expression: str, answer: Any, in_path: dict[str, str]) -> Any:
    """An expression of OpenAPI's links, of the few kinds that the document has."""
    if expression.startswith("$request.path."):
        return in_path[expression.removeprefix("$request.path.")]
    if not expression.startswith("$response.body#/"):
        return expression
    for part in expression.removeprefix("$response.body#/").split("/"):
        answer = answer[int(part)] if isinstance(answer, list) else answer[part]
    return answer
