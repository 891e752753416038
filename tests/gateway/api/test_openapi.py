"""The document at `/openapi.json`, and the server held against it by schemathesis."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from starlette.routing import BaseRoute, Mount, Route

from penstock.engine.config import ModelConfig
from penstock.gateway.api.chat.schema import ChatRequest
from penstock.gateway.api.openapi import document
from penstock.gateway.api.operations import operations_of
from penstock.gateway.api.schema.parameters import UNREAD, Endpoint
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


async def test_a_parameter_is_described_as_it_is_taken(served: Served) -> None:
    answer = await served.http.get("/openapi.json")
    assert answer.headers["content-type"] == "application/json"
    chat = answer.json()["components"]["schemas"]["ChatRequest"]
    names = ChatRequest.model_fields.keys() | UNREAD[Endpoint.CHAT].keys()
    assert chat["properties"].keys() == names
    assert chat["properties"]["model"] == {"enum": ["tiny", None]}
    assert chat["properties"]["tools"]["enum"] == [None, []]
    assert chat["required"] == ["messages"]


@pytest.mark.slow
@pytest.mark.timeout(900)  # minutes, on a busy machine
async def test_the_server_does_what_it_says(serve: Serve, tmp_path: Path) -> None:
    async with serve(info={"max_model_len": 256}) as served:
        process = await asyncio.create_subprocess_exec(
            str(Path(sys.executable).with_name("schemathesis")),
            "run",
            f"http://127.0.0.1:{served.port}/openapi.json",
            f"--checks={','.join(_CHECKS)}",
            "--phases=examples,fuzzing,stateful",
            "--max-examples=8",
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
