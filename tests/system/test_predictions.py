"""`prediction` by the stock client, on the real engine: the same answer in fewer steps, and to the
token also where the engine is killed amid it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
from openai.types import CompletionUsage

from .processes import Served, metrics, serve, wait_until

_BACK_S = 90.0
_ASKED: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "Tell me a story about a fox."}],
    "max_tokens": 100,
}
_GREEDY: dict[str, Any] = {**_ASKED, "temperature": 0}
_SEEDED: dict[str, Any] = {**_ASKED, "temperature": 0.9, "seed": 7, "top_p": 0.95}
_NUM_LONG = 900  # tokens of the answer that the engine is killed amid
_KEY = {"Idempotency-Key": "a-story-with-a-prediction"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    log = tmp_path_factory.mktemp("predictions") / "log"
    with serve("--dtype", "float32", log=log) as served:
        yield served


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
    async with httpx.AsyncClient(base_url=served.base_url) as client:
        names = "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total"
        num_drafted, num_right = await metrics(client, *names)
        return num_drafted, num_right


def client_of(served: Served) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{served.base_url}/v1", api_key="none", max_retries=0, timeout=_BACK_S
    )


@pytest.mark.parametrize("asked", [_GREEDY, _SEEDED], ids=["greedy", "seeded"])
async def test_the_answer_is_the_same(served: Served, asked: dict[str, Any]) -> None:
    async with client_of(served) as client:
        create = client.chat.completions.create
        plain = await create(**asked)
        [choice] = plain.choices
        text = choice.message.content
        assert text
        assert plain.usage is not None
        assert plain.usage.completion_tokens_details is None
        before = await drafted(served)
        for prediction, is_changed in ((text, False), (text.replace("fox", "wolf"), True)):
            answer = await create(**asked, prediction=prediction_of(prediction))
            assert answer.choices[0].message.content == text
            assert answer.choices[0].finish_reason == choice.finish_reason
            assert answer.usage is not None
            assert answer.usage.completion_tokens == plain.usage.completion_tokens
            num_right, num_rejected = counts(answer.usage)
            assert num_right > 0.4 * plain.usage.completion_tokens
            assert (num_rejected > 0) is is_changed
        async with httpx.AsyncClient(base_url=served.base_url) as http:
            said = (await http.get("/metrics")).text
        assert re.search(r'num_accepted_tokens_per_pos_total{.*position="0"} [1-9]', said)
        after = await drafted(served)
        assert after[1] - before[1] > 0.5 * plain.usage.completion_tokens
        off = {"penstock": {"speculation": False}}
        answer = await create(**asked, prediction=prediction_of(text), extra_body=off)
        assert answer.choices[0].message.content == text
        assert counts(answer.usage)[1] == 0
        assert await drafted(served) == after


@dataclass
class Read:
    text: str = ""
    finish_reason: str | None = None
    usage: CompletionUsage | None = None


async def test_an_engine_killed_amid_an_answer_with_a_key(served: Served) -> None:
    """The prediction is the answer's second half, with words changed: without drafts in its first
    half, the answer is far from its end when the engine is killed."""
    asked = {**_GREEDY, "max_tokens": _NUM_LONG, "extra_body": {"ignore_eos": True}}

    async def read(*, num_before_kill: int = 0, **more: Any) -> Read:
        stream = await client.chat.completions.create(
            **asked, **more, stream=True, stream_options={"include_usage": True}
        )
        found, num_chunks = Read(), 0
        async for chunk in stream:
            num_chunks += 1
            if num_chunks == num_before_kill:
                served.renew_family()
                served.child("penstock-engine").kill()
            for choice in chunk.choices:
                found.text += choice.delta.content or ""
                found.finish_reason = choice.finish_reason or found.finish_reason
            found.usage = chunk.usage or found.usage
        return found

    async with client_of(served) as client:
        plain = await read()
        assert plain.finish_reason == "length"
        half = plain.text[len(plain.text) // 2 :]
        prediction = prediction_of(half.replace("the", "no"))
        told = {"prediction": prediction, "extra_headers": _KEY}
        num_back = served.log.read_text().count("the engine is back")
        killed = await read(num_before_kill=5, **told)
        wait_until(lambda: served.log.read_text().count("the engine is back") == num_back + 1)
        assert (await drafted(served))[1] > 0, "the next engine drafts from the prediction too"
        undisturbed = await read(prediction=prediction)
        again = await read(**told)
        for each in (killed, undisturbed, again):
            assert (each.text, each.finish_reason) == (plain.text, plain.finish_reason)
            assert each.usage is not None
            assert each.usage.completion_tokens == _NUM_LONG
            assert counts(each.usage) == counts(undisturbed.usage)
        assert min(counts(killed.usage)) > 0
