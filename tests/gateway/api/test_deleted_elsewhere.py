"""A response that runs at one gateway is deleted at another one of the same Redis."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from ...redis_server import RedisServer
from ..conftest import PATIENCE_S, Serve, until
from .test_idempotency_redis import another

RESPONSES = "/v1/responses"
pytestmark = [pytest.mark.redis, pytest.mark.usefixtures("patient_logs")]


@pytest.mark.parametrize("place", ["response", "conversation"])
async def test_nothing_of_it_stays(
    serve: Serve, model_path: Path, tmp_path: Path, redis_server: RedisServer, place: str
) -> None:
    async with (
        serve(redis_url=redis_server.patient_url) as served,
        another(model_path, tmp_path, redis_url=redis_server.patient_url) as other,
        contextlib.AsyncExitStack() as stack,
    ):
        client = stack.enter_context(redis_server.client())

        def log_keys() -> list[bytes]:
            return [key for key in client.keys("*") if b"log" in key]

        before = set(log_keys())
        served.engine.may_speak.clear()
        conversation = (await served.http.post("/v1/conversations", json={})).json()["id"]
        body = {"input": "x", "background": True, "conversation": conversation}
        response_id = (await served.http.post(RESPONSES, json=body)).json()["id"]
        await served.submitted()
        assert set(log_keys()) - before
        path = f"{RESPONSES}/{response_id}"
        deleted = path if place == "response" else f"/v1/conversations/{conversation}"
        assert (await other.http.delete(deleted)).is_success
        for gateway in (served.http, other.http):
            for query, code in (
                ("", "response_not_found"), ("?stream=true", "response_expired")
            ):  # fmt: skip
                answer = await gateway.get(path + query, timeout=PATIENCE_S)
                assert (answer.status_code, answer.json()["error"]["code"]) == (404, code)
        served.engine.may_speak.set()
        await served.aborted()
        await until(lambda: not set(log_keys()) - before)
