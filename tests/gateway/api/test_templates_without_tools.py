"""Tools with models whose chat templates know none: loops of three turns in every API. Some of the
templates refuse system messages, and roles that do not alternate."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.config import ModelConfig
from tests.support.tiers import tiered

from ...engine.chat_formats.published_templates import TEMPLATES
from ..conftest import Serve, Served
from .test_tools import CHAT_TOOLS, TOOLS, WEATHER, collected, says, written

NAMES = ("smollm2", "llama-2", "mistral-0.1", "gemma-2", "zephyr")
SYSTEM, QUESTION = "Be brief.", "How is the weather?"
CITIES = ('{"city": "Rome"}', '{"city": "Oslo"}', '{"city": "Bad \\"Ems\\""}')
CALLS = [written("weather", city) for city in CITIES]
FIRST, SECOND = f"Let me see.\n{CALLS[0]}", "\n".join(CALLS[1:])
WIDE = {"max_model_len": 1 << 16}
RESULTS = ("rain", "sun", "snow")
# What the last prompt says, in this order.
SAID = (
    SYSTEM, "# Tools", json.dumps(WEATHER["parameters"]), QUESTION, FIRST, "rain", SECOND, "sun",
    "snow",
)  # fmt: skip


@pytest.fixture
def model(request: pytest.FixtureRequest, model_path: Path, tmp_path: Path) -> ModelConfig:
    """One with the template of that name."""
    path = tmp_path / "model"
    shutil.copytree(model_path, path)
    config = {
        "chat_template": TEMPLATES[request.param],
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return ModelConfig(model=str(path))


all_templates = pytest.mark.parametrize("model", NAMES, indirect=True)
one_template = pytest.mark.parametrize("model", ["gemma-2"], indirect=True)


def check_last_prompt(served: Served) -> None:
    prompt = served.prompt_of()
    places = [prompt.find(each) for each in SAID]
    assert -1 not in places, (SAID[places.index(-1)], prompt)
    assert places == sorted(places)
    assert prompt.count("# Tools") == 1
    first = served.prompt_of(0)
    assert prompt.startswith(first.rstrip())


@all_templates
@pytest.mark.parametrize("stream", tiered([False, True], [True]))
async def test_chat(serve: Serve, model: ModelConfig, stream: bool) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": QUESTION},
    ]
    results = list(RESULTS)
    async with serve(model=model, info=WIDE) as served:
        for text, content, num_calls in (
            (FIRST, "Let me see.\n", 1),
            (SECOND, None, 2),
            ("It is fine.", "It is fine.", 0),
        ):
            says(served, text)
            if stream:
                [choice] = await collected(served, messages=messages)
                message = {
                    "role": "assistant",
                    "content": choice["content"] or None,
                    "tool_calls": [
                        {
                            "id": each["id"],
                            "type": "function",
                            "function": {"name": each["name"], "arguments": each["said"]},
                        }
                        for each in choice["calls"].values()
                    ],
                }
            else:
                body = {"messages": messages, "tools": CHAT_TOOLS}
                answer = (await served.http.post("/v1/chat/completions", json=body)).json()
                message = answer["choices"][0]["message"]
            calls = message.get("tool_calls") or []
            assert (message["content"], len(calls)) == (content, num_calls)
            messages.append(message)
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": results.pop(0)}
                for call in calls
            ]
        check_last_prompt(served)


@all_templates
@pytest.mark.parametrize(
    "follows", tiered(["previous_response_id", "conversation", "store"], ["previous_response_id"])
)
async def test_responses(serve: Serve, model: ModelConfig, follows: str) -> None:
    """By the response, in a conversation, and with all items sent again."""
    results = list(RESULTS)
    async with serve(model=model, info=WIDE) as served:
        body: dict[str, Any] = {"instructions": SYSTEM, "tools": TOOLS}
        sent: list[dict[str, Any]] = [{"role": "user", "content": QUESTION}]
        body["input"] = sent
        if follows == "conversation":
            made = await served.http.post("/v1/conversations", json={})
            body["conversation"] = made.json()["id"]
        elif follows == "store":
            body["store"] = False
        for text, kinds in (
            (FIRST, ["message", "function_call"]),
            (SECOND, ["function_call", "function_call"]),
            ("It is fine.", ["message"]),
        ):
            says(served, text)
            answer = await served.http.post("/v1/responses", json=body)
            assert answer.status_code == 200, answer.text
            response = answer.json()
            assert [item["type"] for item in response["output"]] == kinds
            told = [
                {
                    "type": "function_call_output",
                    "call_id": item["call_id"],
                    "output": results.pop(0),
                }
                for item in response["output"]
                if item["type"] == "function_call"
            ]
            body["input"] = told
            if follows == "previous_response_id":
                body["previous_response_id"] = response["id"]
            elif follows == "store":
                sent += [*response["output"], *told]
                body["input"] = sent
        check_last_prompt(served)


@one_template
async def test_choices(serve: Serve, model: ModelConfig) -> None:
    """A named tool, and any that is required, by a grammar in the format of the text; at most one
    call where several are not wanted."""
    named = {"type": "function", "function": {"name": "weather"}}
    async with serve(model=model, info=WIDE) as served:
        says(served, SECOND)
        for asked, num_calls, is_enforced in (
            ({}, 2, False),
            ({"tool_choice": "required"}, 2, True),
            ({"tool_choice": named}, 1, True),
            ({"parallel_tool_calls": False}, 1, False),
            ({"tool_choice": "required", "parallel_tool_calls": False}, 1, True),
            ({"tool_choice": "none"}, 0, False),
        ):
            messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Hi"}]
            [choice] = await collected(served, messages=messages, **asked)
            assert len(choice["calls"]) == num_calls, asked
            assert served.prompt_of().count("# Tools") == 1
            params = list(served.engine.submitted.values())[-1].sampling_params
            if is_enforced:
                assert params.structured_outputs is not None
                assert "<tool_call>" in params.structured_outputs.text
