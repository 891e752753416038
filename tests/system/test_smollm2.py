"""A real model, served by its name."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import openai
import pytest

from tests.support.real_models import smollm2_site

from .processes import Served, serve, wait_until

pytestmark = pytest.mark.process_kills

_QUESTION = "Explain to a child, in many words, why the sky is blue."
_NUM_TOKENS = 150


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setenv("PYTHONPATH", str(smollm2_site()), prepend=os.pathsep)
    with serve("smollm2", log=tmp_path / "log") as server:
        yield server


async def _tokens(client: openai.AsyncOpenAI) -> AsyncIterator[str]:
    stream = await client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": _QUESTION}],
        temperature=0,
        max_tokens=_NUM_TOKENS,
        logprobs=True,
        stream=True,
    )
    async for chunk in stream:
        logprobs = chunk.choices[0].logprobs
        for each in (logprobs and logprobs.content) or ():
            yield each.token


@pytest.mark.exhaustive
async def test_a_stream_goes_on_when_the_engine_is_killed(served: Served) -> None:
    """No token is lost, none is there twice, and the next answer makes sense."""
    assert "model smollm2" in served.line
    async with openai.AsyncOpenAI(base_url=f"{served.base_url}/v1", api_key="none") as client:
        expected = [token async for token in _tokens(client)]
        assert len(expected) > _NUM_TOKENS // 2
        found = []
        async for token in _tokens(client):
            found.append(token)
            if len(found) == 20:
                served.child("penstock-engine").send_signal(signal.SIGKILL)
        assert found == expected
        wait_until(lambda: "the engine is back" in served.log.read_text())
        answer = await client.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            temperature=0,
            max_tokens=30,
        )
        assert "Paris" in str(answer.choices[0].message.content)
