"""`thinking_token_budget` and what other servers call it: what the engine is asked, in the output's
format."""

from __future__ import annotations

from typing import Any

import pytest

from ..conftest import Serve, Served
from .bad_requests import CHAT, COMPLETIONS, RESPONSES, USER

MESSAGES = "/v1/messages"
THINKS = "{{ messages[-1].content }}{% if enable_thinking | default(true) %}<think>\n{% endif %}"
KNOWS_EFFORTS = THINKS + "{{ reasoning_effort }}"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": USER, "max_tokens": 2000},
    MESSAGES: {"messages": USER, "max_tokens": 2000},
    RESPONSES: {"input": "x", "max_output_tokens": 2000},
    COMPLETIONS: {"prompt": "x <think>\n", "max_tokens": 2000},
}
BUDGET = {"type": "enabled", "budget_tokens": 1024}


async def asked_of(served: Served, path: str, **sent: Any) -> Any:
    answer = await served.http.post(path, json=BODIES[path] | sent)
    assert answer.status_code == 200, answer.text
    return list(served.engine.submitted.values())[-1].sampling_params


@pytest.mark.parametrize(
    ("path", "sent"),
    [
        *((path, {"thinking_token_budget": 1024}) for path in BODIES),
        *((path, {"reasoning_budget": 1024}) for path in (CHAT, RESPONSES, COMPLETIONS)),
        (CHAT, {"thinking_budget_tokens": 1024}),
        (CHAT, {"reasoning": {"max_tokens": 1024}}),
        (CHAT, {"reasoning_effort": "high", "thinking_token_budget": 1024}),
        *((path, {"thinking": BUDGET}) for path in (CHAT, RESPONSES, MESSAGES)),
        (CHAT, {"reasoning_effort": "low"}),
        (RESPONSES, {"reasoning": {"effort": "minimal"}}),
        (MESSAGES, {"output_config": {"effort": "low"}}),
    ],
)
async def test_the_engine_gets_the_budget_and_how_a_thought_ends(
    serve: Serve, path: str, sent: dict[str, Any]
) -> None:
    async with serve(chat_template=THINKS) as served:
        params = await asked_of(served, path, **sent)
        limit = params.thought_limit
        assert params.thinking_token_budget == 1024
        assert (limit.begins, limit.ends, limit.is_thinking) == (("<think>",), ("</think>",), True)
        assert served.tokenizer.decode(limit.end_token_ids) == "</think>"


async def test_no_thoughts_are_asked_for_and_enforced(serve: Serve) -> None:
    """A budget of none switches them off in the template; where it goes on, one ends at once."""
    async with serve(chat_template=THINKS) as served:
        params = await asked_of(served, CHAT, reasoning_budget=0)
        assert served.prompt_of() == "hello"
        assert params.thinking_token_budget == 0
        params = await asked_of(served, CHAT, reasoning_budget=0, enable_thinking=True)
        assert served.prompt_of() == "hello<think>\n"
        assert params.thought_limit.is_thinking
    async with serve(chat_template="{{ messages[-1].content }}<think>\n") as served:
        for sent in ({"reasoning_effort": "none"}, {"think": False}):
            params = await asked_of(served, CHAT, **sent)
            assert params.thinking_token_budget == 0
            assert params.thought_limit.is_thinking


@pytest.mark.parametrize(
    "sent", [{}, {"thinking_token_budget": -1}, {"reasoning_effort": "xhigh"}, {"think": True}]
)
async def test_there_is_no_limit_by_default(serve: Serve, sent: dict[str, Any]) -> None:
    async with serve(chat_template=THINKS) as served:
        params = await asked_of(served, CHAT, **sent)
        assert (params.thinking_token_budget, params.thought_limit) == (-1, None)


async def test_a_template_that_knows_efforts_gets_them_alone(serve: Serve) -> None:
    async with serve(chat_template=KNOWS_EFFORTS) as served:
        params = await asked_of(served, CHAT, reasoning_effort="low")
        assert served.prompt_of().endswith("low")
        assert params.thought_limit is None


async def test_a_model_without_thoughts_needs_no_limit(served: Served) -> None:
    params = await asked_of(served, CHAT, thinking_token_budget=64)
    assert params.thought_limit is None


@pytest.mark.parametrize("value", [-2, 1.5, "many", True, 1 << 60])
@pytest.mark.parametrize("path", BODIES)
async def test_what_is_no_budget_is_refused(served: Served, path: str, value: Any) -> None:
    body = BODIES[path] | {"thinking_token_budget": value}
    answer = await served.http.post(path, json=body)
    assert answer.status_code == 400
    assert "thinking_token_budget" in answer.text
    assert not served.engine.submitted


@pytest.mark.parametrize(
    ("sent", "param"),
    [
        ({"reasoning_budget": "x"}, "reasoning_budget"),
        ({"reasoning": {"max_tokens": -5}}, "reasoning"),
        ({"thinking": {"type": "disabled", "budget_tokens": 5}}, "thinking.budget_tokens"),
    ],
)
async def test_a_refusal_names_what_was_sent(
    served: Served, sent: dict[str, Any], param: str
) -> None:
    answer = await served.http.post(CHAT, json=BODIES[CHAT] | sent)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


async def test_a_server_may_say_how_a_thought_ends(serve: Serve) -> None:
    async with serve(chat_template=THINKS, reasoning_budget_message="Time is up.") as served:
        params = await asked_of(served, CHAT, thinking_token_budget=9)
        end = served.tokenizer.decode(params.thought_limit.end_token_ids)
        assert end == "Time is up.</think>"
