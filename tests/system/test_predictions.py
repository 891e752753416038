"""`prediction` by the stock client, on the real engine: the same answer in fewer steps."""

from __future__ import annotations

import re
from typing import Any

import httpx
import openai
import pytest
from openai.types import CompletionUsage

from .processes import END_S, Served, metrics

_ASKED: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "Tell me a story about a fox."}],
    "max_tokens": 100,
}
_GREEDY: dict[str, Any] = {**_ASKED, "temperature": 0}
_SEEDED: dict[str, Any] = {**_ASKED, "temperature": 0.9, "seed": 7, "top_p": 0.95}


def prediction_of(text: str) -> Any:
    return {"type": "content", "content": text}


def counts(usage: CompletionUsage | None) -> tuple[int, int]:
    """Tokens of the prediction that were right, and the others."""
    assert usage is not None
    details = usage.completion_tokens_details
    assert details is not None
    assert details.accepted_prediction_tokens is not None
    assert details.rejected_prediction_tokens is not None
    return details.accepted_prediction_tokens, details.rejected_prediction_tokens


async def drafted(served: Served) -> tuple[float, float]:
    """Tokens that were drafted so far, and those of them that were right."""
    async with httpx.AsyncClient(base_url=served.base_url, timeout=END_S) as client:
        names = "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total"
        num_drafted, num_right = await metrics(client, *names)
        return num_drafted, num_right


def client_of(served: Served) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{served.base_url}/v1", api_key="none", max_retries=0, timeout=END_S
    )


@pytest.mark.parametrize("asked", [_GREEDY, _SEEDED], ids=["greedy", "seeded"])
async def test_the_answer_is_the_same(demo_server: Served, asked: dict[str, Any]) -> None:
    async with client_of(demo_server) as client:
        create = client.chat.completions.create
        plain = await create(**asked)
        [choice] = plain.choices
        text = choice.message.content
        assert text
        assert plain.usage is not None
        assert plain.usage.completion_tokens_details is None
        before = await drafted(demo_server)
        for prediction, is_changed in ((text, False), (text.replace("fox", "wolf"), True)):
            answer = await create(**asked, prediction=prediction_of(prediction))
            assert answer.choices[0].message.content == text
            assert answer.choices[0].finish_reason == choice.finish_reason
            assert answer.usage is not None
            assert answer.usage.completion_tokens == plain.usage.completion_tokens
            num_right, num_rejected = counts(answer.usage)
            assert num_right > 0.4 * plain.usage.completion_tokens
            assert (num_rejected > 0) is is_changed
        async with httpx.AsyncClient(base_url=demo_server.base_url, timeout=END_S) as http:
            said = (await http.get("/metrics")).text
        assert re.search(r'num_accepted_tokens_per_pos_total{.*position="0"} [1-9]', said)
        after = await drafted(demo_server)
        assert after[1] - before[1] > 0.5 * plain.usage.completion_tokens
        off = {"penstock": {"speculation": False}}
        answer = await create(**asked, prediction=prediction_of(text), extra_body=off)
        assert answer.choices[0].message.content == text
        assert counts(answer.usage)[1] == 0
        assert await drafted(demo_server) == after
