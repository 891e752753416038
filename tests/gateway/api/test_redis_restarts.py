"""Redis is lost while a response runs, and comes back after its last token."""

from __future__ import annotations

import asyncio

import pytest

from ...redis_server import RedisServer
from ..conftest import ANSWER, PATIENCE_S, RedisPath, Serve

pytestmark = pytest.mark.redis


@pytest.mark.parametrize("patience_ms", [1.0, 1000 * PATIENCE_S], ids=["late", "waiting"])
async def test_what_ended_meanwhile_can_be_continued(
    serve: Serve, redis_server: RedisServer, patience_ms: float
) -> None:
    """Its end waits for Redis, or is told before Redis is back."""
    is_waiting = patience_ms > 1
    async with (
        RedisPath(redis_server) as path,
        serve(
            redis_url=path.patient_url if is_waiting else path.url, redis_patience_ms=patience_ms
        ) as served,
    ):
        served.engine.may_speak.clear()
        create = served.client.with_options(max_retries=0).responses.create
        asked = asyncio.ensure_future(create(model="tiny", input="one"))
        await served.submitted()
        await path.lose()
        served.engine.may_speak.set()
        done, _ = await asyncio.wait([asked], timeout=0.2 if is_waiting else PATIENCE_S)
        assert bool(done) != is_waiting
        path.find()
        first = await asked
        assert (first.status, first.output_text) == ("completed", ANSWER)
        patient = served.client.with_options(max_retries=0 if is_waiting else 10)
        second = await patient.responses.create(
            model="tiny", input="two", previous_response_id=first.id
        )
        assert second.output_text == ANSWER
        said = f"<user>one\n<assistant>{ANSWER}\n<user>two\n<assistant>"
        assert served.prompt_of() == said
