"""Redis is killed while a response runs, and comes back after its last token."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from ...redis_server import RedisServer
from ..conftest import ANSWER, PATIENCE_S, Serve

pytestmark = pytest.mark.redis


@pytest.mark.parametrize("patience_ms", [1.0, 1000 * PATIENCE_S], ids=["late", "waiting"])
async def test_what_ended_meanwhile_can_be_continued(
    serve: Serve, tmp_path: Path, patience_ms: float
) -> None:
    """Its end waits for Redis, or is told before Redis is back."""
    is_waiting = patience_ms > 1
    with RedisServer(tmp_path / "redis", options={"appendfsync": "no"}) as redis:
        url = redis.patient_url if is_waiting else redis.url
        async with serve(redis_url=url, redis_patience_ms=patience_ms) as served:
            served.engine.may_speak.clear()
            create = served.client.with_options(max_retries=0).responses.create
            asked = asyncio.ensure_future(create(model="tiny", input="one"))
            await served.submitted()
            redis.kill()
            served.engine.may_speak.set()
            done, _ = await asyncio.wait([asked], timeout=0.5 if is_waiting else PATIENCE_S)
            assert bool(done) != is_waiting
            await asyncio.to_thread(redis.start)
            first = await asked
            assert (first.status, first.output_text) == ("completed", ANSWER)
            patient = served.client.with_options(max_retries=0 if is_waiting else 10)
            second = await patient.responses.create(
                model="tiny", input="two", previous_response_id=first.id
            )
            assert second.output_text == ANSWER
            said = f"<user>one\n<assistant>{ANSWER}\n<user>two\n<assistant>"
            assert served.prompt_of() == said
