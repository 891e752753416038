"""The compliance cases of Open Responses (openresponses.org), but for images: each answer and each
event is held against the specification's own schemas."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import llm_comply
import pytest

from ..system.processes import Served

SPEC = json.loads((Path(llm_comply.__file__).parent / "specs/openresponses.json").read_text())
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather of a place.",
    "parameters": {
        "type": "object",
        "properties": {"location": {"type": "string", "description": "A city."}},
        "required": ["location"],
    },
}


def said(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": text}


CASES: dict[str, dict[str, Any]] = {
    "basic": {"input": [said("user", "Say hello in three words.")]},
    "system": {"input": [said("system", "Be brief."), said("user", "Say hello.")]},
    "developer": {"input": [said("developer", "Be brief."), said("user", "Say hello.")]},
    "turns": {
        "input": [
            said("user", "My name is Alice."),
            said("assistant", "Hello Alice!"),
            said("user", "What is my name?"),
        ]
    },
    "phases": {
        "input": [
            said("assistant", "I should say the number.") | {"phase": "commentary"},
            said("assistant", "It is four.") | {"phase": "final_answer"},
            said("user", "Which number?"),
        ]
    },
    "tools": {
        "input": [said("user", "What's the weather like in San Francisco?")],
        "tools": [WEATHER],
    },
    "thoughts": {"input": [said("user", "Hello")], "reasoning": {"effort": "low"}},
}
# Open Responses calls them `response.reasoning.delta` and `.done`, OpenAI and its packages so.
OPENAIS_NAMES = {"response.reasoning_text.delta", "response.reasoning_text.done"}


@pytest.mark.parametrize("case", CASES)
def test_whole(demo_server: Served, case: str) -> None:
    body = {"model": "demo", "temperature": 0, **CASES[case]}
    answer = httpx.post(f"{demo_server.base_url}/v1/responses", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    check(answer.json(), case)


@pytest.mark.parametrize("case", CASES)
def test_streamed(demo_server: Served, case: str) -> None:
    body = {"model": "demo", "temperature": 0, "stream": True, **CASES[case]}
    answer = httpx.post(f"{demo_server.base_url}/v1/responses", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    lines = answer.text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    seen = [event["type"] for event in events]
    assert seen[:2] == ["response.created", "response.in_progress"]
    assert seen[-1] == "response.completed"
    for event in events:
        if event["type"] in OPENAIS_NAMES:
            event["type"] = event["type"].replace("_text", "")
        words = re.split(r"[._]", event["type"])
        validate(event, "".join(map(str.capitalize, words)) + "StreamingEvent")
    check(events[-1]["response"], case)
    if case == "tools":
        for kind in ("function_call_arguments.delta", "function_call_arguments.done"):
            assert f"response.{kind}" in seen


def validate(value: dict[str, Any], name: str) -> None:
    """By a schema of the specification."""
    schema = {"$ref": f"#/components/schemas/{name}", "components": SPEC["components"]}
    jsonschema.validate(value, schema)


def check(response: dict[str, Any], case: str) -> None:
    validate(response, "ResponseResource")
    assert response["status"] == "completed"
    kinds = [item["type"] for item in response["output"]]
    special = {"tools": "function_call", "thoughts": "reasoning"}.get(case, "message")
    assert special in kinds
