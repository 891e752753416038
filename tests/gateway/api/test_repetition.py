"""`repetition_detection`: the engine is asked, and callers learn why an output ended."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.engine.request import FinishReason, RepetitionDetection

from ..conftest import Served
from .bad_requests import CHAT, COMPLETIONS, RESPONSES, USER
from .test_anthropic import BODY

ASKED = {"max_pattern_size": 20, "min_pattern_size": 3, "min_count": 4}
_BODIES: dict[str, dict[str, Any]] = {CHAT: {"messages": USER}, COMPLETIONS: {"prompt": "x"}}


@pytest.fixture
def looping(served: Served) -> Served:
    served.engine.limit_reason = FinishReason.REPETITION
    return served


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_choice_ends_with_stop_and_says_why(looping: Served, path: str) -> None:
    body = {**_BODIES[path], "max_tokens": 3, "repetition_detection": ASKED}
    answer = (await looping.http.post(path, json=body)).json()
    (choice,) = answer["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "repetition")
    (request,) = looping.engine.submitted.values()
    assert request.sampling_params.repetition_detection == RepetitionDetection(**ASKED)
    streamed = await looping.http.post(path, json={**body, "stream": True})
    assert streamed.text.count('"finish_reason":"stop","stop_reason":"repetition"') == 1
    assert streamed.text.endswith("data: [DONE]\n\n")


async def test_a_response_is_incomplete(looping: Served) -> None:
    body = {"input": "x", "max_output_tokens": 3, "repetition_detection": ASKED}
    answer = (await looping.http.post(RESPONSES, json=body)).json()
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "repetition"}


async def test_a_message_of_anthropics_ends_its_turn(looping: Served) -> None:
    answer = (await looping.http.post("/v1/messages", json=BODY | {"max_tokens": 3})).json()
    assert answer["stop_reason"] == "end_turn"


@pytest.mark.parametrize("asked", [None, {}, {"max_pattern_size": 0, "min_count": 0}])
async def test_nothing_is_looked_for_by_default(served: Served, asked: Any) -> None:
    body = {**_BODIES[CHAT], "max_tokens": 3, "repetition_detection": asked}
    answer = (await served.http.post(CHAT, json=body)).json()
    assert "stop_reason" not in answer["choices"][0]
    (request,) = served.engine.submitted.values()
    assert request.sampling_params.repetition_detection is None


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        (True, "repetition_detection"),
        ({"max_pattern_size": -1}, "repetition_detection.max_pattern_size"),
        ({"max_pattern_size": 5000, "min_count": 2}, "repetition_detection.max_pattern_size"),
        ({"max_pattern_size": 5}, "repetition_detection.min_count"),
        ({"max_pattern_size": 5, "min_count": 1}, "repetition_detection.min_count"),
        (
            {"max_pattern_size": 5, "min_count": 2, "min_pattern_size": 6},
            "repetition_detection.min_pattern_size",
        ),
        ({"window": 5}, "repetition_detection.window"),
    ],
)
async def test_what_has_no_meaning_is_refused(served: Served, asked: Any, param: str) -> None:
    answer = await served.http.post(CHAT, json={**_BODIES[CHAT], "repetition_detection": asked})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert not served.engine.submitted
