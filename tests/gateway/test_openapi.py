"""The document at `/openapi.json`, and the server held against it by schemathesis."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from starlette.routing import BaseRoute, Mount, Route

from penstock.gateway.app import create_app
from penstock.gateway.config import GatewayConfig

from .conftest import Serve, Served

_CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "use_after_free",
    "ensure_resource_availability",
)


@pytest.mark.slow
async def test_the_server_does_what_it_says(serve: Serve, tmp_path: Path) -> None:
    async with serve(info={"max_model_len": 256}) as served:
        process = await asyncio.create_subprocess_exec(
            str(Path(sys.executable).with_name("schemathesis")),
            "run",
            f"http://127.0.0.1:{served.port}/openapi.json",
            f"--checks={','.join(_CHECKS)}",
            "--phases=examples,fuzzing,stateful",
            "--max-examples=15",
            "--seed=1",
            "--continue-on-failure",
            "--request-timeout=20",
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
