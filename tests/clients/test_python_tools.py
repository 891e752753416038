"""`run_tools` of the Python client on the real server: each call once, over cut connections."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from pydantic import BaseModel, ValidationError

from penstock.clients import AsyncClient, Client, Tool, calls_of, output_text
from penstock.clients.python.tools import relax_choice

from ..system.processes import Served
from .cutting_proxy import CuttingProxy

ASKED: dict[str, Any] = {"model": "demo", "input": "what is 12 plus 30?", "temperature": 0}


class Calculator:
    """Counts what it is asked, and answers what no model would compute."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    @property
    def tool(self) -> Tool:
        def calculator(expression: str) -> str:
            """Computes."""
            self.asked.append(expression)
            return "4711"

        return Tool.of(calculator)


def check(events: list[Any], calculator: Calculator) -> None:
    assert calculator.asked == ["12 + 30"]
    [told] = [event for event in events if event["type"] == "penstock.tool_output"]
    assert (told["name"], told["output"]) == ("calculator", "4711")
    position = events.index(told)
    for answer in (events[:position], events[position + 1 :]):
        assert [event["sequence_number"] for event in answer] == list(range(len(answer)))
        assert answer[-1]["type"] == "response.completed"
    assert "4711" in output_text(events[-1]["response"])


def test_sync_with_a_cut_at_every_event(demo_server: Served) -> None:
    calculator = Calculator()
    with CuttingProxy(demo_server.base_url, 0, 1) as proxy, Client(proxy.url) as client:
        events = list(client.responses.run_tools(tools=[calculator.tool], **ASKED))
        check(events, calculator)
        assert proxy.num_cut >= len(events) - 1


@pytest.mark.parametrize("store", [True, False])
async def test_async(demo_server: Served, store: bool) -> None:
    calculator = Calculator()
    async with AsyncClient(demo_server.base_url) as client:
        run = client.responses.run_tools(tools=[calculator.tool], store=store, **ASKED)
        check([event async for event in run], calculator)
        assert len(run.responses) == 2
        assert calls_of(run.responses[0])[0]["name"] == "calculator"


async def test_in_a_conversation_with_a_coroutine(demo_server: Served) -> None:
    async def clock(city: str = "") -> dict[str, str]:
        """Tells the time."""
        return {"time": "14:05", "city": city}

    async with AsyncClient(demo_server.base_url) as client:
        made = await client.conversations.create()
        run = client.responses.run_tools(
            model="demo",
            tools=[clock],
            input="what time is it in Orlan?",
            conversation=made["id"],
            temperature=0,
            tool_choice="required",
        )
        final = await run.final()
        assert "14:05" in output_text(final)
        items = await client.conversations.items.list(made["id"], order="asc")
        kinds = [item["type"] for item in items["data"]]
        assert kinds == ["message", "function_call", "function_call_output", "message"]


def test_failures_are_told_to_the_model(demo_server: Served) -> None:
    def calculator(expression: str) -> str:
        raise ZeroDivisionError(expression)

    with Client(demo_server.base_url) as client:
        run = client.responses.run_tools(tools=[calculator], max_rounds=2, **ASKED)
        [told] = [event for event in run if event["type"] == "penstock.tool_output"]
        assert told["output"] == "error: ZeroDivisionError: 12 + 30"  # type: ignore[typeddict-item]


def test_schemas_of_functions() -> None:
    def find(
        text: str, limit: int | None, kinds: list[Literal["a", "b"]], deep: bool = False
    ) -> None:
        """Find things.

        In several lines.
        """

    tool = Tool.of(find)
    assert tool.definition == {
        "type": "function",
        "name": "find",
        "description": "Find things.\n\nIn several lines.",
        "strict": False,
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                "kinds": {"type": "array", "items": {"enum": ["a", "b"]}},
                "deep": {"type": "boolean"},
            },
            "required": ["text", "limit", "kinds"],
            "additionalProperties": False,
        },
    }
    with pytest.raises(TypeError, match="no JSON Schema"):
        Tool.of(print_all)


def print_all(these: set[str]) -> None:
    """Takes what JSON has no type for."""


class Place(BaseModel):
    name: str


class Trip(BaseModel):
    """Where to go."""

    stops: list[Place]


async def test_models_as_arguments(demo_server: Served) -> None:
    """Their definitions are where references look for them, and functions get models."""
    given: list[Any] = []

    def plan(trip: Trip) -> str:
        given.append(trip)
        return "done"

    tool = Tool.of(plan)
    properties = tool.parameters["properties"]
    assert tool.parameters["$defs"]["Place"]["properties"].keys() == {"name"}
    assert properties["trip"]["properties"]["stops"]["items"] == {"$ref": "#/$defs/Place"}
    assert "$defs" not in properties["trip"]
    assert tool.call(trip={"stops": [{"name": "Rome"}]}) == "done"
    assert given == [Trip(stops=[Place(name="Rome")])]
    with pytest.raises(ValidationError):
        tool.call(trip={"stops": 1})


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "calculator"}, "none"])
def test_what_is_asked_of_the_next_round(choice: Any) -> None:
    body = {"tool_choice": choice}
    relax_choice(body)
    assert body == ({"tool_choice": "none"} if choice == "none" else {})
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"name": "f"}]}
    body = {"tool_choice": allowed}
    relax_choice(body)
    assert body == {"tool_choice": {**allowed, "mode": "auto"}}
